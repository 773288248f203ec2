"""The worked examples of docs/algorithms.md, in numbers and a picture: python benchmark/explain.py

Every number comes from the scripts' own functions. The tables are between <!-- name --> and <!-- end name --> in the
page. tests/test_docs.py checks that these functions still give the same tables. All gradients are those of the loss,
except in baseline_table.
"""

import inspect
import sys

import torch

from pictures import GRAY, digest, panels, save
from shared import ROOT, fill, table

sys.path.insert(0, str(ROOT))

import dapo  # noqa: E402
import dr_grpo  # noqa: E402
import grpo  # noqa: E402
import ppo_rlhf  # noqa: E402
import reinforce_baseline  # noqa: E402
import rloo  # noqa: E402

PAGE = ROOT / "docs" / "algorithms.md"
PICTURE = ROOT / "docs" / "algorithms" / "clip.svg"


def number(value, digits=3):
    """The number as text, with its sign. Zero has no sign."""
    text = f"{float(value):+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def numbers(values, digits=3):
    return [number(value, digits) for value in values]


def token_gradients(script, advantages, lengths, **fields):
    """The loss of a group at a ratio of 1, and its gradient by each log-probability (n, R)."""
    flags = vars(script.Args(max_new_tokens=10, **fields))
    names = inspect.signature(script.policy_loss).parameters
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (n, R)
    logprobs = torch.full(mask.shape, -1.0, requires_grad=True)  # (n, R)
    advantages = torch.as_tensor(advantages)[:, None]  # (n, 1)
    # dapo.py has no reference, and divides by the number of tokens.
    old = [logprobs.detach()] * (1 if script is dapo else 2)
    given = {"num_tokens": mask.sum()} if script is dapo else {"num_seqs": len(lengths)}
    given |= {name: value for name, value in flags.items() if name in names}
    loss, _ = script.policy_loss(logprobs, *old, advantages, mask, **given)
    loss.backward()
    return loss.item(), logprobs.grad


def baseline_table() -> str:
    """The variance of one response's gradient of J for three baselines.

    There are two responses, one right and one wrong. The policy is right with probability p = sigmoid(theta), and the
    reward is 1 or 0. The gradient of log pi by theta is 1 - p for the right response, and -p for the wrong one.
    """
    rows = []
    for p in (0.1, 0.5, 0.9):
        probabilities, score = torch.tensor([p, 1 - p]), torch.tensor([1 - p, -p])  # (2,)
        rewards = torch.tensor([[1.0, 0.0]])  # (1, 2)
        weights = probabilities * score**2  # (2,)
        best = (weights * rewards[0]).sum() / weights.sum()
        variances = []
        for baseline in (torch.tensor(0.0), torch.tensor(p), best):
            sampled = reinforce_baseline.compute_advantages(rewards, baseline)[0] * score  # (2,)
            mean = (probabilities * sampled).sum()
            variances.append(f"{(probabilities * (sampled - mean) ** 2).sum():.4f}")
        rows.append([f"{p}", f"{mean:.4f}", *variances])
        rows[-1][-1] += f" (b = {best:.1f})"
    header = ["p", "mean gradient of J, any b", "variance, b = 0", "b = p, the mean reward"]
    return table([*header, "best b"], rows)


def gae_table() -> str:
    """A response of four tokens that earns 1 at its end. A critic gives a value to each token."""
    values, rewards = torch.tensor([[0.5, 0.6, 0.2, 0.6]]), torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    rows = [["reward", *(f"{x:g}" for x in rewards[0])], ["V", *(f"{x:.1f}" for x in values[0])]]
    names = {0.0: "0: each delta alone", 0.95: "0.95", 1.0: "1: return minus V"}
    for gae_lambda, name in names.items():
        advantages, _ = ppo_rlhf.compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=gae_lambda)
        rows.append([f"A, lambda {name}", *numbers(advantages[0], 2)])
    return table(["token", "1", "2", "3", "4"], rows)


def kl_table() -> str:
    """The estimators for a vocabulary of three tokens: mean, std, and expected gradients.

    The gradients are with respect to the logits. The policy is the one that sampled, so rho is 1.
    """
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    logits = policy.log().requires_grad_()
    # Each token is one response.
    logprobs, ref_logprobs = logits.log_softmax(0)[:, None], reference.log()[:, None]  # (3, 1)
    mask = torch.ones(3, 1, dtype=torch.bool)
    old = logprobs.detach()

    # The mean over the policy's tokens. No gradient goes through their probabilities.
    def expected(values):
        return (policy * values).sum()

    def gradient(value):
        if not value.requires_grad:
            return "(0.000, 0.000, 0.000)"
        (slope,) = torch.autograd.grad(value, logits, retain_graph=True)
        return f"({', '.join(numbers(slope))})"

    k1 = -ppo_rlhf.kl_rewards(torch.zeros(3), logprobs, ref_logprobs, mask, beta=1.0)[:, 0]  # (3,)
    # With an advantage of 0, the loss of GRPO is only its KL term, k3.
    rest = dict(advantages=torch.zeros(1, 1), mask=mask[:1], num_seqs=1, clip_eps=0.2, beta=1.0)
    losses = []
    for token in zip(logprobs, old, ref_logprobs, strict=True):
        loss, _ = grpo.policy_loss(*(x[None] for x in token), **rest)
        losses.append(loss)
    k3 = torch.stack(losses)  # (3,)
    ratio = (logprobs - old).exp()[:, 0]  # (3,)
    rows = []
    for name, values in {"k1": k1, "k2": 0.5 * k1**2, "k3": k3, "rho k3": ratio * k3}.items():
        mean = expected(values.detach())
        std = expected((values.detach() - mean) ** 2).sqrt()
        in_reward = gradient(expected(values.detach() * logprobs[:, 0]))
        rows.append([name, f"{mean:.3f}", f"{std:.3f}", gradient(expected(values)), in_reward])
    now = logits.log_softmax(0)
    forward = (now.exp() * (now - reference.log())).sum()
    reverse = (reference * (reference.log() - now)).sum()
    for name, exact in (("KL(pi, ref), exact", forward), ("KL(ref, pi), exact", reverse)):
        rows.append([name, f"{exact:.3f}", "", gradient(exact), ""])
    return table(["", "mean", "std", "gradient, in the loss", "gradient, in the reward"], rows)


def group_table() -> str:
    """A group of 8: from rewards to gradients of the loss. All responses have ten tokens."""
    rewards = torch.tensor([[1.4, 1.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.0]])  # (1, 8)
    advantages = grpo.compute_advantages(rewards)[0]  # (8,)
    loss, gradients = token_gradients(grpo, advantages, [10] * 8, beta=0.0)
    rows = [
        ["r - mean", *numbers(rewards[0] - rewards.mean(), 1)],
        ["A = (r - mean) / std", *numbers(advantages, 2)],
        ["its share of the loss, -A / 8", *numbers(-advantages / 8, 3)],
        ["gradient of the loss by each log pi", *numbers(gradients[:, 0], 4)],
        ["the step makes its tokens", *("likelier" if x < 0 else "rarer" for x in gradients[:, 0])],
    ]
    sums = f"The mean is {rewards.mean():.2f} and the std {rewards.std():.3f}. "
    sums += f"The loss is the sum of the shares, {abs(loss):.3f}.\n"
    return table(["reward", *(f"{x:.1f}" for x in rewards[0])], rows) + "\n" + sums


def std_table() -> str:
    """The advantages of an uneven and of an even group, without and with the std."""
    rows, sums = [], []
    for num_right in (1, 4):
        rewards = torch.tensor([[1.0] * num_right + [0.0] * (8 - num_right)])  # (1, 8)
        cells = [f"{num_right} of 8 right", f"{rewards.std():.3f}"]
        for script in (dr_grpo, grpo):
            advantages = script.compute_advantages(rewards)[0]  # (8,)
            sums.append(advantages.abs().sum())
            cells += [", ".join(numbers(advantages[[0, -1]])), f"{sums[-1]:.2f}"]
        rows.append(cells)
    without_std, with_std = sums[0] / sums[2], sums[1] / sums[3]
    rows.append(["first row / second", "", "", f"{without_std:.2f}", "", f"{with_std:.2f}"])
    header = ["group", "std"]
    for name in ("dr_grpo.py", "grpo.py"):
        header += [f"{name}: A of a right one, of a wrong one", "sum of the eight sizes"]
    return table(header, rows)


def division_table() -> str:
    """The gradients of the loss for a right response of 2 tokens and a wrong one of 8, with advantages 1 and -1."""
    rows = []
    for script, factor, fields in (
        (rloo, "1 / G", {"beta": 0.0}),
        (grpo, "1 / G, 1 / length", {"beta": 0.0}),
        (dapo, "1 / all tokens", {}),
        (dr_grpo, "1 / G, 1 / limit", {"beta": 0.0}),
    ):
        _, gradients = token_gradients(script, [1.0, -1.0], [2, 8], **fields)
        cells = numbers(gradients[:, 0], 4) + numbers(gradients.sum(1), 2)
        rows.append([script.SCRIPT.name, factor, *cells])
    header = ["", "factor", "a token of the right response", "a token of the wrong one"]
    return table([*header, "all 2 right tokens", "all 8 wrong tokens"], rows)


TABLES = {
    "baseline": baseline_table,
    "gae": gae_table,
    "kl": kl_table,
    "group": group_table,
    "std": std_table,
    "division": division_table,
}
RATIOS = torch.linspace(0.5, 1.5, 101)


def surrogates(advantage: float) -> list[float]:
    """The clipped objective of one token at these ratios, computed by grpo.py."""
    old, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    given = (old, None, torch.full((1, 1), advantage), mask)
    losses = []
    for ratio in RATIOS:
        logprobs = ratio.log().view(1, 1)  # (1, 1)
        loss, _ = grpo.policy_loss(logprobs, *given, num_seqs=1, clip_eps=0.2, beta=0.0)
        losses.append(round(-loss.item(), 4))
    return losses


def drawn_from() -> str:
    return digest([surrogates(1.0), surrogates(-1.0)])


def draw_clip() -> None:
    """The clipped objective of one token against its ratio, for A = 1 and A = -1."""
    figure, axes = panels(1, 2, figsize=(12, 4.2), sharex=True)
    for ax, advantage, name in zip(axes[0], (1.0, -1.0), ("A = 1", "A = -1"), strict=True):
        ax.plot(RATIOS, advantage * RATIOS, color=GRAY, linestyle=":", label="ratio times A")
        ax.plot(RATIOS, surrogates(advantage), color="C0", linewidth=2.5, label="clipped")
        ax.plot([1], [advantage], "o", color="C0")
        for bound in (1 - grpo.Args.clip_eps, 1 + grpo.Args.clip_eps):
            ax.axvline(bound, color=GRAY, linewidth=0.8, linestyle="--")
        ax.set_title(name, fontsize=13)
        ax.set_xlabel("ratio: probability now / when it was sampled")
    axes[0, 0].set_ylabel("objective, to be raised")
    axes[0, 0].text(1.22, 0.95, "gained enough:\nno gradient")
    axes[0, 1].text(0.52, -1.05, "rare enough:\nno gradient")
    axes[0, 0].legend(loc="lower right")
    save(figure, PICTURE, drawn_from())


def main() -> None:
    for name, make in TABLES.items():
        fill(PAGE, name, make())
    draw_clip()


if __name__ == "__main__":
    main()
