"""docs/speed.md's curves: do grpo.py and rloo.py learn as TRL's trainers do? python benchmark/learn_trl.py

Both sides train on the bundled task with the same model, data (in another order), batch, learning rate and schedule,
steps, temperature, KL coefficient and seeds. The gradient of the KL is the same, too: TRL 1.16 multiplies k3 by the
ratio rho by default, so "TRL" turns that off, and "TRL, rho k3" leaves it on. Each run has a process to itself, with
two threads.

benchmark/records/trl-learn.jsonl gets one line for each run: the accuracy of the samples and the wall time at every
step, and the peak memory above what the imports take. benchmark/readme.py draws the records.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from pictures import digest, draw_band, panels, save, smooth
from records import FOLDER, ROOT, memory, read_run, write

RECORDS = FOLDER / "trl-learn.jsonl"
SEEDS, STEPS = (1, 2, 3), 60
B, G, R = 16, 8, 32
# Who trains, for each algorithm.
SIDES = {"grpo": ("PlainRL", "TRL", "TRL, rho k3"), "rloo": ("PlainRL", "TRL")}


def run_plainrl(name: str, seed: int, folder: str) -> dict:
    """Run the script as it runs without a flag, except that it evaluates one problem, and only before and after."""
    sys.path.insert(0, str(ROOT))
    import torch

    script = __import__(name)
    torch.set_num_threads(2)
    imported = memory("VmRSS")
    start = time.perf_counter()
    ends = []
    sample_responses = script.sample_responses

    # A step ends when the next step or the last evaluation starts to sample.
    def timed(*args, **named):
        ends.append(time.perf_counter() - start)
        return sample_responses(*args, **named)

    script.sample_responses = timed
    given = dict(seed=seed, device="cpu", eval_every=0, eval_size=1, runs_dir=folder)
    script.main(replace(script.BUNDLED, **given, run_name="run"))
    records, _ = read_run(Path(folder, "run"))
    accuracy = [record["rollout/accuracy"] for record in records[1:]]
    return dict(accuracy=accuracy, seconds=ends[2:], memory=memory("VmHWM") - imported)


def run_trl(side: str, name: str, seed: int, folder: str) -> dict:
    sys.path.insert(0, str(ROOT))
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from utils.rewards import accuracy_reward, format_reward

    torch.set_num_threads(2)
    imported, start, ends, accuracy = memory("VmRSS"), time.perf_counter(), [], []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter() - start)

    def reward(completions, answer, **kwargs):
        right = accuracy_reward(completions, answer)
        accuracy.append(sum(right) / len(right))
        return [a + b for a, b in zip(right, format_reward(completions, answer), strict=True)]

    config, trainer = (
        (trl.GRPOConfig, trl.GRPOTrainer) if name == "grpo" else (trl.RLOOConfig, trl.RLOOTrainer)
    )
    fields = dict(
        num_generations=G, max_completion_length=R, temperature=1.0, top_k=0, top_p=1.0, beta=0.01
    )
    fields |= dict(
        num_iterations=1, learning_rate=1e-4, lr_scheduler_type="linear", max_steps=STEPS, seed=seed
    )
    fields |= dict(
        per_device_train_batch_size=B * G, gradient_accumulation_steps=1, max_grad_norm=1.0
    )
    fields |= dict(
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
    )
    fields |= dict(save_strategy="no", disable_tqdm=True)
    if name == "grpo":
        fields |= dict(loss_type="grpo", use_bias_correction_kl=side == "TRL, rho k3")
    adder = ROOT / "assets" / "addition" / "adder"
    data = str(ROOT / "assets" / "addition" / "train.jsonl")
    rows = load_dataset("json", data_files=data, split="train", cache_dir=folder)
    trainer(
        model=AutoModelForCausalLM.from_pretrained(adder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(adder),
        args=config(output_dir=folder, **fields),
        train_dataset=rows.rename_column("question", "prompt"),
        reward_funcs=reward,
        callbacks=[Clock()],
    ).train()
    return dict(accuracy=accuracy, seconds=ends, memory=memory("VmHWM") - imported)


def label(side: str, name: str) -> str:
    if side == "PlainRL":
        return f"{name}.py"
    return f"{name.upper()}Trainer of TRL 1.16" + side.removeprefix("TRL")


def to_reach(record: dict, level: float = 0.9) -> tuple[float, int]:
    """Seconds and responses until the mean accuracy of five steps reaches the level; NaN and 0 if it never does."""
    for k in range(4, len(record["accuracy"])):
        if sum(record["accuracy"][k - 4 : k + 1]) / 5 >= level:
            return record["seconds"][k], (k + 1) * B * G
    return float("nan"), 0


def draw(records: list[dict]) -> None:
    figure, axes = panels(1, 2, figsize=(8, 3.2), sharey=True)
    for ax, name in zip(axes[0], ("grpo", "rloo"), strict=True):
        for color, side in enumerate(SIDES[name]):
            mine = [
                record for record in records if (record["name"], record["side"]) == (name, side)
            ]
            curves = np.stack([smooth(record["accuracy"]) for record in mine])  # (seeds, steps)
            draw_band(ax, B * G * np.arange(1, STEPS + 1), curves, f"C{color}", label(side, name))
        ax.set_xlabel("responses sampled")
        ax.legend()
    axes[0, 0].set_ylabel("accuracy of the samples")
    save(figure, RECORDS.with_suffix(".svg"), digest(records))


def main() -> None:
    # With arguments, this process is a single run.
    if len(sys.argv) == 5:
        side, name, seed, folder = sys.argv[1:]
        if side == "PlainRL":
            result = run_plainrl(name, int(seed), folder)
        else:
            result = run_trl(side, name, int(seed), folder)
        Path(folder, "result.json").write_text(json.dumps(result))
        return
    environment = os.environ | {
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    records = []
    for seed in SEEDS:
        for name in SIDES:
            # The order alternates, so that a machine that slows down is fair to all sides.
            for side in SIDES[name][:: 1 if seed % 2 else -1]:
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, side, name, str(seed), folder]
                    done = subprocess.run(command, env=environment, capture_output=True, text=True)
                    if done.returncode:
                        raise SystemExit(
                            f"error: {side}, {name}, seed {seed} failed\n{done.stderr[-3000:]}"
                        )
                    record = dict(side=side, name=name, seed=seed) | json.loads(
                        Path(folder, "result.json").read_text()
                    )
                    records.append(record)
                    last, (seconds, responses) = sum(record["accuracy"][-5:]) / 5, to_reach(record)
                    cost = f"all {record['seconds'][-1]:.1f} s, {record['memory'] / 1e6:.0f} MB"
                    reached = f"0.9 after {seconds:.1f} s, {responses} responses"
                    print(
                        f"{name:5} {side:11} seed {seed}: last five steps {last:.3f}; {reached}; {cost}",
                        flush=True,
                    )
    for record in records:
        record |= {
            key: [round(value, 4) for value in record[key]] for key in ("accuracy", "seconds")
        }
    write(RECORDS, records)


if __name__ == "__main__":
    main()
