"""docs/lessons.md's table of variances of the policy gradient, under five baselines: python benchmark/variance.py

It measures three moments: the adder at the start, and after 20 and 40 steps of rloo.py. At each moment it samples 8
responses to each of 512 questions, and computes the gradient g of the log-probability of each response. The estimate
from one response is (R - b) g, with the return R (both rewards) and the baseline b. Its variance, summed over all
weights, is E[|(R - b) g|^2] - |E[(R - b) g]|^2. It takes four minutes on one core.
"""

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from records import FOLDER, ROOT, fill, provenance, python, read, table, write

sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402

OUT, PAGE = FOLDER / "variance.jsonl", ROOT / "docs" / "lessons.md"
QUESTIONS, SAMPLES, MOMENTS = 512, 8, (0, 20, 40)
BASELINES = ["none", "mean of all", "mean of the others", "greedy response", "best constant"]


def measure(folder, steps: int) -> dict:
    """Variance and signal of the gradient estimate for each baseline, for the policy in this folder."""
    args = replace(grpo.BUNDLED, device="cpu", model=str(folder))
    tokenizer = grpo.AutoTokenizer.from_pretrained(args.model)
    model, eos_ids = grpo.load_model(args, tokenizer)
    examples = grpo.load_data(args, tokenizer)[0][:QUESTIONS]
    torch.manual_seed(1)
    sample = partial(grpo.sample_responses, args, model, examples, eos_ids=eos_ids)
    rollout = sample(num_samples=SAMPLES, temperature=1.0)
    greedy = sample(num_samples=1, temperature=0.0)
    completions = grpo.response_texts(tokenizer, rollout, eos_ids)  # N texts
    greedy_completions = grpo.response_texts(tokenizer, greedy, eos_ids)  # B texts
    scores = grpo.apply_rewards(completions, examples, "cpu")
    R = sum(scores.values())  # (N,)
    greedy_R = sum(grpo.apply_rewards(greedy_completions, examples, "cpu").values())  # (B,)
    groups = R.view(-1, SAMPLES)  # (B, G)

    weights = [x for x in model.parameters() if x.requires_grad]
    baselines = {
        "none": torch.zeros_like(R),
        "mean of all": R.mean().expand_as(R),
        "mean of the others": (groups.sum(1, keepdim=True) - groups).flatten() / (SAMPLES - 1),
        "greedy response": greedy_R.repeat_interleave(SAMPLES),
    }
    # g doesn't depend on b. So the sums of g, R g and b g give the mean for every baseline, and only |g|^2 is needed
    # for the rest.
    squares = torch.zeros_like(R)  # (N,)
    sums = {name: torch.zeros(sum(x.numel() for x in weights)) for name in ("g", *baselines)}
    for i in range(len(R)):
        logprobs = grpo.compute_logprobs(model, rollout.select([i]), 1.0)  # (1, R)
        grads = torch.autograd.grad(logprobs.sum(), weights)
        g = torch.cat([x.flatten() for x in grads])
        squares[i] = g @ g
        sums["g"] += g
        for name, b in baselines.items():
            sums[name] += (R[i] - b[i]) * g
    best = (squares * R).sum() / squares.sum()
    baselines["best constant"] = best.expand_as(R)
    sums["best constant"] = sums["none"] - best * sums["g"]

    record = {"steps": steps, **provenance(), "responses": len(R), "mean_reward": R.mean().item()}
    record |= {"right": scores["accuracy_reward"].mean().item(), "best": best.item()}
    is_right = R > 1
    record["square_right"] = squares[is_right].mean().item()
    record["square_wrong"] = squares[~is_right].mean().item()
    for name in BASELINES:
        second = ((R - baselines[name]) ** 2 * squares).mean()
        mean = sums[name] / len(R)
        variance = (second - mean @ mean) * len(R) / (len(R) - 1)
        # Noise adds variance / N to the square of a mean.
        signal = mean @ mean - variance / len(R)
        record[name] = {"variance": variance.item(), "signal": signal.item()}
    return record


def make_table(records) -> str:
    """A table in Markdown: for each moment the variances, and the signal-to-noise ratio of 128 responses."""
    rows = []
    for record in records:
        ratio = record["square_wrong"] / record["square_right"]
        row = [f"{record['steps']} steps, {100 * record['right']:.0f} % right", "variance"]
        row += [f"{record[name]['variance']:.0f}" for name in BASELINES]
        rows.append([*row, f"{record['best']:.2f}", f"{ratio:.0f}"])
        found = [record[name] for name in BASELINES]
        signals = [f"{128 * x['signal'] / x['variance']:.1f}" for x in found]
        rows.append(["", "signal / noise of 128", *signals, "", ""])
    return table(["policy", "", *BASELINES, "best b", "square of g, wrong : right"], rows)


def main() -> None:
    records = []
    for steps in MOMENTS:
        with tempfile.TemporaryDirectory() as runs:
            folder = ROOT / "assets" / "addition" / "adder"
            if steps:
                python(f"rloo.py --num-steps {steps} --device cpu --runs-dir {runs} --run-name run")
                folder = Path(runs, "run", "model")
            records.append(measure(folder, steps))
            print(records[-1], flush=True)
    write(OUT, records)
    fill(PAGE, "variance", make_table(read(OUT)))


if __name__ == "__main__":
    main()
