"""docs/real-model.md: runs of a real chat model, their records, tables and pictures.

    python benchmark/real_model.py FOLDER grpo:1 rloo:1 trl_grpo:1    these runs of these seeds, one after another
    python benchmark/real_model.py FOLDER --all --data DATA           all that have no record yet, and --draw
    python benchmark/real_model.py --draw                             write the tables and the pictures
    python benchmark/real_model.py --export grpo rloo                 runs/records/grpo-1 .. for report/report.py

FOLDER holds SmolLM2-135M-Instruct, and DATA the folders svamp and gsm8k. On two cores a run takes ten minutes or more.
If the program is stopped, the same command goes on: a run from its last checkpoint, a run of TRL from its beginning.
benchmark/records/real-model.jsonl gets a line for each finished run. It replaces the old line of this name and seed.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from pictures import GRAY, digest, draw_band, panels, save, smooth
from shared import FOLDER, ROOT, command_line, fill, provenance, read, read_run, table, time_command, write

RECORDS = FOLDER / "real-model.jsonl"
PAGE = ROOT / "docs" / "real-model.md"
PICTURES = ROOT / "docs" / "real-model"
RUNS_DIR = ROOT / "runs" / "real-model"

ON_CPU = "--no-gradient-checkpointing --micro-batch-tokens 2048 --device cpu"
# Arithmetic in words. The only reward is 1 if the last number of a response is right.
ARITHMETIC_TASK = (ROOT / "assets" / "arithmetic" / "task.py").read_text(encoding="utf-8")
ARITHMETIC = (
    f"{ON_CPU} --dataset assets/arithmetic --no-examples --max-new-tokens 32 --warmup-updates 3 "
    "--eval-every 10 --eval-size 200 --save-every 10"
)
TASK = f"{ARITHMETIC} --num-steps 40"
# 32 responses a step, in groups of eight or one for each prompt.
GROUPS = f"{TASK} --num-prompts 4 --num-generations 8"
SINGLE = f"{TASK} --num-prompts 32 --num-generations 1"

# The two programs of docs/extend.md: one writes a task as a data set, the other is the reward.
SECTION = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTION = SECTION.partition("## A task of reasoning-gym\n")[2].partition("\n## ")[0]
WRITE_TASK, JUDGE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
# A prompt begins with three solved entries of the task.
TASK_OF_GYM = (
    f"{ON_CPU} --no-examples --num-prompts 4 --max-new-tokens 32 --num-steps 40 --warmup-updates 3 --beta 0 "
    "--eval-every 20 --eval-size 50 --save-every 10"
)
# Tasks of reasoning-gym with different kinds of answers: a number, a text, a fraction, yes or no.
GYM = ["gcd", "spell_backward", "fraction_simplification", "syllogism"]

# A reward that is easy to game: it reads all numbers of a response, and not its last one alone.
ANYWHERE = '''
import re


def anywhere_reward(completions, answer, **columns):
    """1.0 if the answer is one of the numbers in the completion, else 0.0."""
    return [float(gold in re.findall(r"\\d+", text)) for text, gold in zip(completions, answer)]


REWARDS = [anywhere_reward]
EXAMPLES = []
'''

# The rounding of a GPU on a CPU: autocast in the update, and a sampler and a reference in bf16.
# The last line is for grpo_offpolicy.py, which has not all of the others.
ROUNDED = {
    'torch.autocast("cuda", enabled=rows.is_cuda': 'torch.autocast("cpu", torch.bfloat16',
    'model.device.type == "cuda"': "True",
    'model.device.type != "cuda"': "False",
    'torch.get_autocast_dtype("cuda")': "torch.bfloat16",
    'return "float32"': 'return "bfloat16"',
}

# For each name: the script, its flags, and the text of its task. None: the default task.
RUNS = {
    "grpo": ("grpo", GROUPS, ARITHMETIC_TASK),
    "dr_grpo": ("dr_grpo", GROUPS, ARITHMETIC_TASK),
    "dapo": ("dapo", f"{GROUPS} --overlong-cache 8", ARITHMETIC_TASK),
    "rloo": ("rloo", GROUPS, ARITHMETIC_TASK),
    "reinforce_baseline": ("reinforce_baseline", SINGLE, ARITHMETIC_TASK),
    # One pass in four updates instead of four passes: so a step costs as much as in the others.
    "ppo_rlhf": (
        "ppo_rlhf",
        f"{SINGLE} --num-iterations 1 --num-minibatches 4 --value-init policy",
        ARITHMETIC_TASK,
    ),
    "gspo": ("gspo", GROUPS, ARITHMETIC_TASK),
    "remax": ("remax", SINGLE, ARITHMETIC_TASK),
    # An adapter takes about ten times the learning rate of all weights.
    "grpo_lora": ("grpo_lora", f"{GROUPS} --learning-rate 1e-4", ARITHMETIC_TASK),
    "vapo": ("vapo", f"{GROUPS} --value-warmup-steps 5", ARITHMETIC_TASK),
    "grpo_vllm": ("grpo_vllm", GROUPS, ARITHMETIC_TASK),
    # Lessons.
    "four_updates": ("grpo", f"{GROUPS} --num-minibatches 4", ARITHMETIC_TASK),
    "dapo_no_penalty": ("dapo", f"{GROUPS} --overlong-cache 0", ARITHMETIC_TASK),
    "dapo_as_sampled": ("dapo", f"{GROUPS} --overlong-cache 0 --max-resample 0", ARITHMETIC_TASK),
    "rloo_norm_1000": ("rloo", f"{GROUPS} --max-grad-norm 1000", ARITHMETIC_TASK),
    "rloo_no_kl": ("rloo", f"{GROUPS} --beta 0", ARITHMETIC_TASK),
    "four_passes": ("grpo", f"{GROUPS} --num-iterations 4", ARITHMETIC_TASK),
    "four_passes_unclipped": ("grpo", f"{GROUPS} --num-iterations 4 --clip-eps 1e9", ARITHMETIC_TASK),
    "anywhere": ("grpo", GROUPS, ANYWHERE),
    "lora_rank_1": ("grpo_lora", f"{GROUPS} --learning-rate 1e-4 --lora-rank 1", ARITHMETIC_TASK),
    "lora_rank_64": ("grpo_lora", f"{GROUPS} --learning-rate 1e-4 --lora-rank 64", ARITHMETIC_TASK),
    "lora_fast": ("grpo_lora", f"{GROUPS} --learning-rate 3e-4", ARITHMETIC_TASK),
    "lora_128": (
        "grpo_lora",
        f"{ARITHMETIC} --num-steps 20 --num-prompts 16 --learning-rate 3e-4",
        ARITHMETIC_TASK,
    ),
    # grpo.py with twice the batch, and on word problems.
    "grpo_64": ("grpo", f"{ARITHMETIC} --num-steps 60 --num-prompts 8", ARITHMETIC_TASK),
    "svamp": (
        "grpo",
        f"{ON_CPU} --dataset svamp --num-prompts 4 --max-new-tokens 64 --num-steps 20 --warmup-updates 3 "
        "--beta 0 --eval-every 0 --eval-size 60",
        None,
    ),
    "gsm8k": (
        "grpo",
        f"{ON_CPU} --dataset gsm8k --num-prompts 4 --max-new-tokens 150 --num-steps 6 --warmup-updates 3 "
        "--beta 0 --eval-every 0 --eval-size 30",
        None,
    ),
    "grpo_bf16": ("grpo", GROUPS, ARITHMETIC_TASK),
    "grpo_offpolicy_bf16": ("grpo_offpolicy", f"{GROUPS} --engine-dtype bfloat16", ARITHMETIC_TASK),
    **{f"gym_{task}": ("grpo", TASK_OF_GYM, JUDGE) for task in GYM},
    # TRL's trainers with the same model, data, reward, batch, learning rate and KL.
    "trl_grpo": ("trl_grpo", GROUPS, ARITHMETIC_TASK),
    "trl_rloo": ("trl_rloo", GROUPS, ARITHMETIC_TASK),
}
THREE_SEEDS = "grpo dr_grpo dapo gspo rloo reinforce_baseline ppo_rlhf trl_grpo".split()
THREE_SEEDS += ["grpo_64", "gym_gcd"]
SEEDS = {name: (1, 2, 3) if name in THREE_SEEDS else (1,) for name in RUNS}
# The runs that one picture and one table compare.
COMPARED = ["grpo", "dr_grpo", "dapo", "gspo", "grpo_lora", "rloo", "reinforce_baseline", "remax"]
COMPARED += ["ppo_rlhf", "vapo", "grpo_vllm", "trl_grpo", "trl_rloo"]
KEPT = ["rollout/accuracy", "rollout/response_len", "rollout/eos_frac", "rollout/zero_std_frac"]
KEPT += ["rollout/format_reward", "rollout/logprob_gap", "rollout/logprob_gap_max"]
KEPT += ["policy/entropy", "policy/clip_frac", "policy/approx_kl", "optim/grad_norm", "kl/ref"]
KEPT += ["value/explained_var", "time/rollout_s", "time/reward_s", "time/update_s"]


def record_of(name: str, seed: int, run: Path) -> dict:
    """The record of a finished run: curves, evaluations, and samples of its first and its last step."""
    metrics, args = read_run(run)
    steps = metrics[1:]
    record = {"name": name, "seed": seed}
    record["args"] = {k: x for k, x in args.items() if not k.startswith("run")}
    for field in ("model", "task", "dataset"):
        record["args"][field] = Path(args[field]).name
    record["eval"] = {
        line["step"]: {k: round(x, 4) for k, x in line.items() if k.startswith("eval/")}
        for line in metrics
        if "eval/accuracy" in line
    }
    # vapo.py logs no metrics of the policy in its first steps.
    record["curves"] = {
        key: [float(f"{line.get(key, math.nan):.4g}") for line in steps]
        for key in KEPT
        if any(key in line for line in steps)
    }
    samples = read(run / "samples.jsonl")
    if name == "anywhere":  # what the other runs' reward would have been
        record["curves"]["last_number"] = last_number_curve(samples, len(steps))
    record["samples"] = {}
    for step in (1, len(steps)):
        shown = [sample for sample in samples if sample["step"] == step][:3]
        record["samples"][step] = [[sample["prompt"], sample["answer"], sample["completions"][:2]] for sample in shown]
    return record


def last_number_curve(samples: list[dict], num_steps: int) -> list[float]:
    """For each step, the share of its responses whose last number is right."""
    sys.path.insert(0, str(ROOT))
    from utils.rewards import lenient_accuracy_reward

    right = [[] for _ in range(num_steps)]
    for sample in samples:
        completions = sample["completions"]
        answers = [sample["answer"]] * len(completions)
        right[sample["step"] - 1] += lenient_accuracy_reward(completions, answers)
    return [round(sum(values) / len(values), 4) for values in right]


def write_task(folder: Path, task: str) -> Path:
    """Write a task of reasoning-gym as folder/task.jsonl."""
    program = WRITE_TASK.replace('"gcd"', json.dumps(task))
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
    return folder / "task.jsonl"


def run(name: str, seed: int, model: str, data: str) -> dict:
    """Make or finish one run, and return its record."""
    script, flags, task = RUNS[name]
    if name in ("svamp", "gsm8k"):
        flags = flags.replace(f"--dataset {name}", f"--dataset {data}/{name}")
    folder = RUNS_DIR / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith("gym_"):
        flags += f" --dataset {write_task(folder, name.removeprefix('gym_'))}"
    source = folder / "source.json"
    if not source.exists():
        source.write_text(json.dumps(provenance()))
    if script.startswith("trl_"):
        shutil.rmtree(folder / "run", ignore_errors=True)
        command = [sys.executable, __file__, model, f"{name}:{seed}", "--in-this-process"]
    else:
        copy = folder / f"{script}.py"
        shutil.copy(ROOT / f"{script}.py", copy)
        if script != "grpo_vllm":
            # On a CPU it saves time. It may reject the hunk of the docstring.
            patch = ["patch", "-s", copy, ROOT / "variants" / "shared_prompts.diff"]
            subprocess.run(patch, stdout=subprocess.DEVNULL)
            assert "def common_tokens(" in copy.read_text(encoding="utf-8")
        if name.endswith("_bf16"):
            text = copy.read_text(encoding="utf-8")
            assert sum(on_gpu in text for on_gpu in ROUNDED) >= 3
            for on_gpu, on_cpu in ROUNDED.items():
                text = text.replace(on_gpu, on_cpu)
            copy.write_text(text, encoding="utf-8")
        task_file = ROOT / "utils" / "task.py"
        if task:
            task_file = folder / "task.py"
            task_file.write_text(task, encoding="utf-8")
        command = [sys.executable, str(copy), "--model", model, *flags.split()]
        command += ["--task", str(task_file)]
        command += ["--seed", str(seed), "--runs-dir", str(folder), "--run-name", "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    _, _, peak = time_command(command, cwd=ROOT, env=environment)
    record = record_of(name, seed, folder / "run")
    record |= json.loads(source.read_text()) | {"peak_mem_gb": round(peak, 2)}
    shutil.rmtree(folder)
    return record


def export(name: str) -> None:
    """Write the records of this name as folders of runs, which report/report.py can draw beside another run."""
    for record in [record for record in read(RECORDS) if record["name"] == name]:
        folder = ROOT / "runs" / "records" / f"{name}-{record['seed']}"
        folder.mkdir(parents=True, exist_ok=True)
        args = {key: x for key, x in record["args"].items() if key not in ("device", "model")}
        (folder / "args.json").write_text(json.dumps(args), encoding="utf-8")
        # The report names a run after the script in its folder.
        script = folder / f"{RUNS[name][0]}.py"
        script.write_text("# A record of benchmark/real_model.py\n", encoding="utf-8")
        num_steps = len(record["curves"]["rollout/accuracy"])
        lines = [{"step": step} for step in range(num_steps + 1)]
        for key, values in record["curves"].items():
            for line, value in zip(lines[1:], values, strict=True):
                line[key] = value
        for step, evaluation in record["eval"].items():
            lines[int(step)] |= evaluation
        write(folder / "metrics.jsonl", lines)
        samples = []
        for step, shown in record["samples"].items():
            for prompt, answer, completions in shown:
                sample = {"step": int(step), "prompt": prompt, "answer": answer}
                samples.append(sample | {"completions": completions})
        write(folder / "samples.jsonl", samples)
        print(folder.relative_to(ROOT))


def train_with_trl(name: str, seed: int, model_folder: str) -> None:
    """Train with GRPOTrainer or RLOOTrainer, and write a run's folder as grpo.py does.

    grpo.py's own evaluate measures the held-out questions, at the same steps. Its time doesn't count.
    """
    sys.path.insert(0, str(ROOT))
    import grpo
    import torch
    from transformers import TrainerCallback
    from utils.rewards import lenient_accuracy_reward

    from compare_trl import trl_trainer

    folder = RUNS_DIR / f"{name}-{seed}"
    run_dir = folder / "run"
    run_dir.mkdir()
    flags = ["--model", model_folder, *GROUPS.split(), "--seed", str(seed)]
    flags += ["--task", str(ROOT / "assets" / "arithmetic" / "task.py")]
    args = grpo.tyro.cli(grpo.Args, args=flags)
    task = grpo.load_task(args)
    (run_dir / "args.json").write_text(json.dumps(vars(args)))
    tokenizer = grpo.AutoTokenizer.from_pretrained(model_folder)
    train_data, test_data = grpo.load_data(args, task, tokenizer)
    model, eos_ids = grpo.load_model(args, tokenizer)
    metrics_file = (run_dir / "metrics.jsonl").open("w")
    samples_file = (run_dir / "samples.jsonl").open("w")
    clock = {"start": 0.0}
    step = {}  # the metrics of the current step

    def evaluate():
        model.eval()
        with torch.no_grad():
            metrics, _ = grpo.evaluate(args, task, model, tokenizer, test_data, eos_ids)
        model.train()
        return metrics

    def reward(completions, answer, completion_ids, **columns):
        texts = [completion[0]["content"] for completion in completions]
        rewards = lenient_accuracy_reward(texts, answer)
        lengths = [len(ids) for ids in completion_ids]
        ended = [ids[-1] in eos_ids.tolist() for ids in completion_ids]
        step["rollout/accuracy"] = sum(rewards) / len(rewards)
        step["rollout/response_len"] = sum(lengths) / len(lengths)
        step["rollout/eos_frac"] = sum(ended) / len(ended)
        sample = {"step": trainer.state.global_step + 1, "prompt": "", "answer": answer[0]}
        print(json.dumps(sample | {"completions": texts[:8]}), file=samples_file)
        return rewards

    class Log(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            clock["start"] = time.perf_counter()

        def on_step_end(self, training, state, control, **kwargs):
            # TRL has no separate times for the rollout and the update in a record of a step.
            step["time/rollout_s"] = 0.0
            step["time/update_s"] = time.perf_counter() - clock["start"]
            step["step"] = state.global_step
            if state.global_step % args.eval_every == 0:
                step.update(evaluate())
            print(json.dumps(step), file=metrics_file, flush=True)
            step.clear()

    before = {"step": 0} | evaluate()
    print(json.dumps(before), file=metrics_file, flush=True)
    fields = dict(
        num_generations=args.num_generations,
        per_device_train_batch_size=args.num_prompts * args.num_generations,
        gradient_accumulation_steps=1,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        beta=args.beta,
        learning_rate=args.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=args.warmup_updates,
        max_steps=args.num_steps,
        max_grad_norm=args.max_grad_norm,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        output_dir=str(folder / "trl"),
    )
    if name == "trl_grpo":
        # The gradient of the KL as in grpo.py: TRL 1.16 multiplies k3 by the ratio by default.
        fields["use_bias_correction_kl"] = False
    rows = []
    for example in train_data:
        prompt = [{"role": "user", "content": example["columns"]["question"]}]
        rows.append({"prompt": prompt, "answer": example["answer"]})
    trainer = trl_trainer(
        name.removeprefix("trl_"),
        fields,
        model=model,
        processing_class=tokenizer,
        train_dataset=grpo.datasets.Dataset.from_list(rows),
        reward_funcs=reward,
        callbacks=[Log()],
    )
    trainer.train()


def label(name: str) -> str:
    """The name of a run in the picture and in the table."""
    trainers = {"trl_grpo": "GRPOTrainer of TRL", "trl_rloo": "RLOOTrainer of TRL"}
    return trainers.get(name, f"{name}.py")


def step_seconds(record: dict) -> np.ndarray:
    # In older records, the seconds of the rewards are a part of the update.
    parts = [x for name, x in record["curves"].items() if name.startswith("time/")]
    return np.sum(parts, axis=0)


def greedy_curves(records: list[dict]) -> np.ndarray:
    """The accuracies on held-out questions, (records, evaluations)."""
    return np.array([[x["eval/accuracy"] for x in r["eval"].values()] for r in records])


def before_and_after(record: dict, name: str, digits: int) -> str:
    """An evaluation's value before and after training; a dash if the run didn't compute it."""
    values = [x.get(name) for x in record["eval"].values()]
    if values[0] is None:
        return "-"
    return f"{values[0]:.{digits}f} → {values[-1]:.{digits}f}"


def single_runs_table(records: list[dict]) -> str:
    """grpo.py with 64 samples a step on arithmetic, and its runs on word problems."""
    rows = []
    for record in sorted(records, key=lambda x: (list(RUNS).index(x["name"]), x["seed"])):
        if record["name"] not in ("grpo_64", "svamp", "gsm8k"):
            continue
        seconds = step_seconds(record)
        right = before_and_after(record, "eval/accuracy", 3)
        lenient = before_and_after(record, "eval/accuracy_lenient", 3)
        if lenient == "-":  # the reward of this run is the lenient one
            right, lenient = lenient, right
        task = "arithmetic" if record["name"] == "grpo_64" else record["name"]
        row = [task, str(record["seed"]), str(len(seconds)), right, lenient]
        row.append(before_and_after(record, "eval/format_reward", 2))
        row.append(before_and_after(record, "eval/eos_frac", 2))
        row.append(before_and_after(record, "eval/response_len", 0))
        row.append(f"{seconds[0]:.0f} → {np.mean(seconds[-5:]):.0f}")
        row.append(f"{record.get('seconds', seconds.sum()) / 60:.0f}")
        rows.append([*row, f"{record['peak_mem_gb']:.1f}"])
    header = ["task", "seed", "steps", "right", "right, lenient", "format", "ended", "tokens"]
    return table([*header, "seconds a step", "minutes", "GB"], rows)


def compared_table(records: list[dict]) -> str:
    """Runs of 40 steps, by name: the mean of the seeds."""
    rows = []
    for name in COMPARED:
        mine = [record for record in records if record["name"] == name]

        def last_five(key: str, digits: int, mine=mine) -> str:
            if key not in mine[0]["curves"]:
                return "-"
            return f"{np.mean([record['curves'][key][-5:] for record in mine]):.{digits}f}"

        row = [label(name), str(len(mine))]
        row += [f"{value:.2f}" for value in greedy_curves(mine).mean(0)[1:]]
        row += [last_five("rollout/accuracy", 2), last_five("rollout/response_len", 0)]
        row += [last_five("kl/ref", 2), last_five("policy/entropy", 2)]
        on_cpu = [record for record in mine if "gpu" not in record]
        row.append(f"{np.median([step_seconds(record) for record in on_cpu]):.0f}")
        rows.append([*row, f"{np.mean([record['peak_mem_gb'] for record in on_cpu]):.1f}"])
    header = ["", "seeds", "10", "20", "30", "40", "sampled", "tokens", "KL", "entropy"]
    return table([*header, "seconds a step", "GB"], rows)


def pairs_table(records: list[dict]) -> str:
    """After which steps all seeds of a row are above all seeds of a column, for names with three seeds."""
    curves = {}
    for name in COMPARED:
        mine = [record for record in records if record["name"] == name]
        if len(mine) == 3:
            curves[name] = greedy_curves(mine)[:, 1:]  # (seeds, evaluations)
    names = sorted(curves, key=lambda name: -curves[name].mean())
    rows = []
    for name in names:
        row = [label(name)]
        for other in names:
            apart = curves[name].min(0) > curves[other].max(0)
            row.append(" ".join(str(10 * (k + 1)) for k in np.flatnonzero(apart)) or "-")
        rows.append(row)
    return table(["above", *map(label, names)], rows)


def gym_table(records: list[dict]) -> str:
    """The runs on tasks of reasoning-gym."""
    rows = []
    mine = [record for record in records if record["name"].startswith("gym_")]
    for record in sorted(mine, key=lambda x: (list(RUNS).index(x["name"]), x["seed"])):
        curves = record["curves"]
        row = [record["name"].removeprefix("gym_"), str(record["seed"])]
        row.append(before_and_after(record, "eval/accuracy", 2))
        for key, digits in (
            ("rollout/accuracy", 2),
            ("rollout/zero_std_frac", 2),
            ("policy/entropy", 2),
            ("rollout/response_len", 1),
        ):
            first, last = np.mean(curves[key][:5]), np.mean(curves[key][-5:])
            row.append(f"{first:.{digits}f} → {last:.{digits}f}")
        rows.append(row)
    header = ["task", "seed", "greedy", "sampled", "equal groups", "entropy", "tokens"]
    return table(header, rows)


def draw_gym(records: list[dict]) -> None:
    """The judge's mean score of the samples in each run on a task of reasoning-gym."""
    figure, axes = panels(1, len(GYM), figsize=(13, 3.2))
    for ax, task in zip(axes[0], GYM, strict=True):
        mine = [record for record in records if record["name"] == f"gym_{task}"]
        curves = np.array([smooth(record["curves"]["rollout/accuracy"]) for record in mine])
        equal = np.array([smooth(record["curves"]["rollout/zero_std_frac"]) for record in mine])
        steps = np.arange(1, curves.shape[1] + 1)
        draw_band(ax, steps, curves, "tab:blue", "score of the samples")
        draw_band(ax, steps, equal, "tab:orange", "share of equal groups")
        ax.set(xlabel="step", title=task, ylim=(0, 1))
    axes[0][1].legend(loc="upper left", fontsize=9)
    save(figure, PICTURES / "tasks.svg", digest(records))


def samples_block(record: dict) -> str:
    """The first samples of the first and of the last step, as a code block."""
    lines = ["```\n"]
    for step, shown in record["samples"].items():
        lines.append(f"step {step}\n")
        for prompt, answer, completions in shown:
            question = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
            lines.append(f"  {question}  ({answer})\n")
            lines += [f"      {completion!r}\n" for completion in completions]
    return "".join([*lines, "```\n"])


def draw_three_seeds(runs: list[dict]) -> None:
    """Three panels over the steps of grpo.py with 64 samples: right answers, length, and entropy."""
    figure, axes = panels(1, 3, figsize=(13, 3.6))
    panel = {
        "rollout/accuracy": "share of right answers",
        "rollout/response_len": "tokens",
        "policy/entropy": "nats",
    }
    for ax, (name, unit) in zip(axes[0], panel.items(), strict=True):
        curves = np.array([smooth(record["curves"][name]) for record in runs])
        steps = np.arange(1, curves.shape[1] + 1)
        draw_band(ax, steps, curves, "tab:blue", "samples (running mean of 5 steps)")
        title = "right answers" if name == "rollout/accuracy" else name
        ax.set(xlabel="step", ylabel=unit, title=title)
    across = [int(step) for step in runs[0]["eval"]]
    draw_band(axes[0][0], across, greedy_curves(runs), "tab:orange", "held out, greedy")
    axes[0][0].legend(fontsize=10)
    save(figure, PICTURES / "curves.svg", digest(runs))


def draw_compared(records: list[dict]) -> None:
    """Greedy accuracy over 40 steps: a panel for each algorithm, with grpo.py in gray in all of them."""
    others = [name for name in COMPARED if name != "grpo"]
    figure, axes = panels(3, 4, figsize=(13, 8), sharex=True, sharey=True)
    grpo_runs = [record for record in records if record["name"] == "grpo"]
    for ax, name in zip(axes.flat, others, strict=True):
        mine = [record for record in records if record["name"] == name]
        across = [int(step) for step in mine[0]["eval"]]
        draw_band(ax, across, greedy_curves(grpo_runs), GRAY)
        draw_band(ax, across, greedy_curves(mine), "tab:blue")
        ax.set(title=label(name), ylim=(0, 0.7))
    for ax in axes[-1]:
        ax.set(xlabel="step")
    for ax in axes[:, 0]:
        ax.set(ylabel="share of right answers")
    save(figure, PICTURES / "algorithms.svg", digest(records))


def blocks() -> dict[str, str]:
    """The page's generated texts, by the name of their place."""
    records = read(RECORDS)
    first = next(x for x in records if x["name"] == "grpo_64" and x["seed"] == 1)
    return {
        "results": single_runs_table(records),
        "algorithms": compared_table(records),
        "samples": samples_block(first),
        "pairs": pairs_table(records),
        "gym": gym_table(records),
    }


def drawn() -> dict[str, list[dict]]:
    """The records that each picture shows."""
    records = read(RECORDS)
    return {
        "curves": [record for record in records if record["name"] == "grpo_64"],
        "algorithms": [record for record in records if record["name"] in COMPARED],
        "tasks": [record for record in records if record["name"].startswith("gym_")],
    }


def write_page() -> None:
    draw_three_seeds(drawn()["curves"])
    draw_compared(drawn()["algorithms"])
    draw_gym(drawn()["tasks"])
    for name, text in blocks().items():
        fill(PAGE, name, text)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", nargs="?", help="the model's folder")
    parser.add_argument("runs", nargs="*", help="name:seed of each run")
    parser.add_argument("--data", default=".", help="the folder with svamp and gsm8k")
    parser.add_argument("--draw", action="store_true", help="only write tables and pictures")
    parser.add_argument("--export", nargs="+", default=[], choices=RUNS, metavar="NAME")
    parser.add_argument("--all", action="store_true", help="all runs that have no record yet")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jobs = [(name, int(seed)) for name, seed in (job.split(":") for job in args.runs)]
    if args.in_this_process:
        train_with_trl(*jobs[0], args.model)
        return
    if args.all:
        names = [name for name in RUNS if name != "grpo_vllm" or find_spec("vllm")]
        jobs = [(name, seed) for name in names for seed in SEEDS[name]]
    for name in args.export:
        export(name)
    for job in jobs:
        if args.all and job in {(record["name"], record["seed"]) for record in read(RECORDS)}:
            continue
        record = run(*job, args.model, args.data)
        others = [other for other in read(RECORDS) if (other["name"], other["seed"]) != job]
        write(RECORDS, [*others, record])
        print(job, {step: x["eval/accuracy"] for step, x in record["eval"].items()}, flush=True)
    if args.draw or args.all:
        write_page()


if __name__ == "__main__":
    main()
