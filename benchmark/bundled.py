"""Run every script with no argument but the seed, and record what it reached: python benchmark/bundled.py

grpo_multigpu.py runs as two processes of one thread each, the others as one of all threads.

Writes one line per run to benchmark/records/bundled.jsonl: script, seed, accuracy before and after (greedy, on the
held-out additions), wall time of the whole command, sequences sampled, and the sampled accuracy at every step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["reinforce_baseline", "rloo", "grpo", "dr_grpo", "dapo", "ppo_rlhf"]
SCRIPTS += ["gspo", "remax", "grpo_offpolicy", "grpo_process", "grpo_multigpu"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--scripts", nargs="+", default=SCRIPTS)
parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "records" / "bundled.jsonl")


def main() -> None:
    args = parser.parse_args()
    records = []
    for seed in args.seeds:
        for script in args.scripts:
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                launcher = "-m torch.distributed.run --nproc-per-node 2" if script == "grpo_multigpu" else ""
                flags = f"{script}.py --seed {seed} --runs-dir {folder} --run-name run"
                command = [sys.executable, *launcher.split(), *flags.split()]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                seconds = time.perf_counter() - start
                lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            metrics = [json.loads(line) for line in lines]
            record = {"script": script, "seed": seed, "seconds": round(seconds, 1), "episodes": metrics[-1]["episodes"]}
            record |= {"before": metrics[0]["eval/accuracy"], "after": metrics[-1]["eval/accuracy"]}
            record |= {"sampled_accuracy": [round(line["rollout/accuracy"], 3) for line in metrics[1:]]}
            records.append(record)
            print({name: value for name, value in record.items() if name != "sampled_accuracy"}, flush=True)
            args.out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
