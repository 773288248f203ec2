"""docs/real-model.md: an untrained chat model on the tasks of reasoning-gym, each with its own judge.

    pip install -r benchmark/requirements.txt
    python benchmark/reasoning.py FOLDER            all tasks that have no record yet, and the table
    python benchmark/reasoning.py FOLDER gcd lcm    these tasks
    python benchmark/reasoning.py                   the table alone

FOLDER holds SmolLM2-135M-Instruct. The data set and the reward are those of docs/extend.md. For each task there are 40
responses: four to each of ten questions, at temperature 0.9, with at most 64 tokens. Prompts have at most 1,024 tokens.
On two cores all tasks take an hour. benchmark/records/reasoning.jsonl gets a line for each.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared import FOLDER, ROOT, command_line, fill, provenance, read, table

RECORDS = FOLDER / "reasoning.jsonl"
PAGE = ROOT / "docs" / "real-model.md"
NUM_QUESTIONS, NUM_SAMPLES = 10, 4
# The two programs of docs/extend.md: one writes a task as a data set, the other is the reward.
SECTION = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTION = SECTION.partition("## A task of reasoning-gym\n")[2].partition("\n## ")[0]
WRITE_TASK, JUDGE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def write_task(folder: Path, task: str) -> Path:
    """Write a task as folder/task.jsonl, by the page's program."""
    program = WRITE_TASK.replace('"gcd"', json.dumps(task))
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
    return folder / "task.jsonl"


def survey(task: str, model_folder: str) -> dict:
    """What the untrained model does on a task: a record."""
    import torch

    sys.path.insert(0, str(ROOT))
    import grpo

    names = {"json": json}
    exec(JUDGE, names)
    grpo.REWARDS = names["REWARDS"]
    args = dict(model=model_folder, examples=False, max_prompt_tokens=1024, max_new_tokens=64)
    tokenizer = grpo.AutoTokenizer.from_pretrained(model_folder)
    with tempfile.TemporaryDirectory() as folder:
        args = grpo.Args(**args, dataset=str(write_task(Path(folder), task)), device="cpu")
        examples, _ = grpo.load_data(args, tokenizer)
    examples = examples[:NUM_QUESTIONS]
    model, eos_ids = grpo.load_model(args, tokenizer)
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    sampled = (examples, NUM_SAMPLES, args.temperature, eos_ids)
    rollout = grpo.sample_responses(args, model, *sampled)
    seconds = time.perf_counter() - start
    completions = grpo.response_texts(tokenizer, rollout, eos_ids)
    (scores,) = grpo.apply_rewards(completions, examples, "cpu").values()
    scores = scores.reshape(len(examples), -1)
    unequal = scores.max(1).values != scores.min(1).values
    ended = torch.isin(rollout.response_ids, eos_ids).any(1)
    return {
        "task": task,
        "questions": len(examples),
        "samples": len(completions),
        "prompt_tokens": round(sum(len(x["prompt_ids"]) for x in examples) / len(examples)),
        "score": round(scores.mean().item(), 4),
        "right": round((scores == 1).float().mean().item(), 4),
        "unequal_groups": round(unequal.float().mean().item(), 4),
        "ended": round(ended.float().mean().item(), 4),
        "tokens": round(rollout.response_mask.sum(1).float().mean().item(), 1),
        "seconds": round(seconds, 1),
        "example": [
            examples[0]["columns"]["question"][-1]["content"],
            examples[0]["answer"],
            completions[0],
        ],
    }


def tasks_table(records: list[dict]) -> str:
    """The tasks with unequal groups for at least eight of ten questions, the most unequal first."""
    found = [record for record in records if "error" not in record]
    rows = []
    for record in sorted(found, key=lambda x: (-x["unequal_groups"], -x["score"])):
        if record["unequal_groups"] >= 0.8:
            row = [record["task"], f"{record['unequal_groups']:.1f}", f"{record['score']:.2f}"]
            row += [f"{record['right']:.2f}", f"{record['ended']:.2f}", f"{record['tokens']:.0f}"]
            rows.append([*row, str(record["prompt_tokens"])])
    header = ["task", "unequal groups", "score", "right", "ended", "tokens", "prompt"]
    return table(header, rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", nargs="?", help="the model's folder")
    parser.add_argument("tasks", nargs="*")
    options = parser.parse_args()
    if options.model:
        from reasoning_gym.factory import DATASETS

        for task in options.tasks or sorted(DATASETS):
            if not options.tasks and task in {record["task"] for record in read(RECORDS)}:
                continue
            try:
                record = survey(task, options.model)
            except Exception as error:  # such as a task whose prompts are all too long
                record = {"task": task, "error": f"{type(error).__name__}: {error}"[:300]}
            with RECORDS.open("a", encoding="utf-8") as file:
                print(json.dumps(record | provenance()), file=file)
            print({key: value for key, value in record.items() if key != "example"}, flush=True)
    fill(PAGE, "tasks", tasks_table(read(RECORDS)))


if __name__ == "__main__":
    main()
