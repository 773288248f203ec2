"""benchmark/records/bundled.jsonl: what every script reaches with its defaults. python benchmark/bundled.py

The runs need an idle machine, and take an hour of two cores. grpo_multigpu.py runs as two processes of one thread
each. The other scripts run as one process that uses all threads. grpo_vllm.py is left out where vllm isn't installed,
and on the emulated device.

benchmark/records/bundled.jsonl gets one line for each run: script, seed, commit (and "dirty", if the tree had changes),
the machine's state before the run, versions, wall time of the whole command, peak memory of the process, number of
responses sampled, greedy accuracies on the held-out additions, and the sampled accuracy at every step. A new record
replaces the old one of the same script and seed. All other records stay. benchmark/tables.py writes the records into
the tables of the pages.

    python benchmark/bundled.py --scripts cispo sapo --out benchmark/records/variants.jsonl   scripts of variants/
    python benchmark/bundled.py --task sums --scripts grpo --seeds 1 2 3     assets/sums; bundled-sums.jsonl
    python benchmark/bundled.py --device emulated   a GPU's precision on a CPU: tests/emulated_cuda
    python benchmark/bundled.py --device emulated --dtype float16 --seeds 1     bundled-emulated-float16.jsonl
"""

import shlex
import sys
import tempfile
from pathlib import Path

from shared import (
    FOLDER,
    ROOT,
    command_line,
    in_place,
    provenance,
    read,
    read_run,
    time_command,
    write,
)

sys.path.insert(0, str(ROOT / "tools"))

from scripts import MULTI_PROCESS, NEEDS_VLLM, SCRIPTS, can_sample  # noqa: E402

SUMS = "--model assets/sums/student --dataset assets/sums --no-examples --num-steps 60 --learning-rate 5e-5"
TASKS = {"adder": "", "sums": f"{SUMS} --eval-every 20"}


def run(script: str, seed: int, device: str, task: str = "adder", dtype: str = "auto") -> dict:
    # Asked first, because the script of a patch would count as a change.
    source = provenance()
    with tempfile.TemporaryDirectory() as folder, in_place([script]):
        launcher = "-m torch.distributed.run --nproc-per-node 2" if script in MULTI_PROCESS else ""
        on = "cuda" if device == "emulated" else device
        flags = f"{script}.py --seed {seed} --device {on} --runs-dir {folder} --run-name run"
        flags = f"{flags} --dtype {dtype} {TASKS[task]}".split()
        if device == "emulated":
            launcher, flags = f"{launcher} tests/emulated_cuda", [shlex.join(flags)]
        command = [sys.executable, *launcher.split(), *flags]
        _, seconds, peak = time_command(command, cwd=ROOT)
        metrics, _ = read_run(Path(folder, "run"))
        # On the emulated GPU, the memory of that GPU.
        peak = metrics[-1].get("time/peak_mem_gb", peak)
    record = {
        "script": script,
        "seed": seed,
        **source,
        "seconds": round(seconds, 1),
        "peak_mem_gb": round(peak, 3),
        "episodes": metrics[-1]["episodes"],
        "device": device,
        "dtype": dtype,
        # Updates whose gradient wasn't finite.
        "skipped": sum(line["optim/skipped"] for line in metrics[1:]),
        # The gap of the worst step.
        "logprob_gap": max(line["rollout/logprob_gap"] for line in metrics[1:]),
    }
    for name in ("accuracy", "accuracy_lenient"):
        # Before and after the training.
        record[name] = [metrics[step][f"eval/{name}"] for step in (0, -1)]
    if task != "adder":
        evaluated = [line for line in metrics if "eval/accuracy" in line]
        record["task"] = task
        record["held_out"] = [[line["step"], line["eval/accuracy"]] for line in evaluated]
        record["response_len"] = [round(line["rollout/response_len"], 1) for line in metrics[1:]]
    record["sampled_accuracy"] = [round(line["rollout/accuracy"], 3) for line in metrics[1:]]
    return record


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--scripts", nargs="+", help="default: all that can run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--task", choices=list(TASKS), default="adder")
    parser.add_argument("--device", choices=("cpu", "emulated"), default="cpu")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16"), default="auto")
    parser.add_argument("--out", type=Path, help="default: records/bundled-TASK-DEVICE.jsonl")
    args = parser.parse_args()
    kinds = [args.task] * (args.task != "adder") + [args.device] * (args.device != "cpu")
    kinds += [args.dtype] * (args.dtype != "auto")
    name = "-".join(["bundled", *kinds]) + ".jsonl"
    out = args.out or FOLDER / name
    scripts = args.scripts
    if scripts is None:
        without = NEEDS_VLLM if args.device == "emulated" else []
        scripts = [name for name in SCRIPTS if can_sample(name) and name not in without]
    for seed in args.seeds:
        for script in scripts:
            record = run(script, seed, args.device, args.task, args.dtype)
            shown = ("script", "seed", "seconds", "peak_mem_gb", "accuracy", "accuracy_lenient")
            print(*(f"{name} {record[name]}" for name in shown), flush=True)
            others = [x for x in read(out) if (x["script"], x["seed"]) != (script, seed)]
            write(out, [*others, record])


if __name__ == "__main__":
    main()
