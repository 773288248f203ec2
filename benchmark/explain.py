"""The worked examples of docs/algorithms.md, in numbers and pictures: python benchmark/explain.py

Every number comes from the scripts' own functions. The tables are between <!-- name --> and
<!-- end name --> in the page. tests/test_docs.py checks that these functions still give the same
tables. All gradients are those of the loss, except in baseline_table.
"""

import sys

import torch
from pictures import GRAY, digest, panels, save
from records import ROOT, fill, table

sys.path.insert(0, str(ROOT))

import dapo  # noqa: E402
import dr_grpo  # noqa: E402
import grpo  # noqa: E402
import ppo_rlhf  # noqa: E402
import reinforce_baseline  # noqa: E402
import rloo  # noqa: E402

PAGE = ROOT / "docs" / "algorithms.md"
PICTURES = ROOT / "docs" / "algorithms"
# The rewards of a group of 8.
REWARDS = [1.4, 1.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.0]
# The lengths of a right and of a wrong response, and the longest length allowed.
LENGTHS, LIMIT = [2, 8], 10
# The probabilities of the next token.
POLICY, REFERENCE = [0.7, 0.2, 0.1], [0.4, 0.4, 0.2]


def number(value, digits=3):
    """The number as text, with its sign. Zero has no sign."""
    text = f"{float(value):+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def token_gradients(script, advantages, lengths, **fields):
    """The loss of a group at a ratio of 1, and its gradient by each log-probability (n, R)."""
    args = script.Args(max_new_tokens=LIMIT, **fields)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (n, R)
    logprobs = torch.full(mask.shape, -1.0, requires_grad=True)  # (n, R)
    old_logprobs = logprobs.detach()  # (n, R)
    advantages = torch.as_tensor(advantages)[:, None]  # (n, 1)
    if script is dapo:
        loss, _ = dapo.policy_loss(
            args, logprobs, old_logprobs, advantages, mask, num_tokens=mask.sum()
        )
    else:
        loss, _ = script.policy_loss(
            args, logprobs, old_logprobs, old_logprobs, advantages, mask, num_seqs=len(lengths)
        )
    loss.backward()
    return loss.item(), logprobs.grad


# ==== tables ====


def baseline_table() -> str:
    """The variance of one response's gradient for three baselines.

    There are two responses, one right and one wrong. The policy is right with probability
    p = sigmoid(theta), and the reward is 1 or 0. The gradient is that of J, by theta.
    """
    rows = []
    for p in (0.1, 0.5, 0.9):
        probabilities = torch.tensor([p, 1 - p])  # (2,)
        rewards = torch.tensor([[1.0, 0.0]])  # (1, 2)

        # (2,): the gradients of the right and of the wrong response.
        def gradients(baseline, p=p, rewards=rewards):
            advantages = reinforce_baseline.compute_advantages(rewards, baseline)[0]  # (2,)
            theta = torch.tensor([p, p]).logit().requires_grad_()  # (2,)
            logprobs = torch.stack([theta[0], -theta[1]]).sigmoid().log()[:, None]  # (2, 1)
            mask = torch.ones(2, 1, dtype=torch.bool)
            args = reinforce_baseline.Args(beta=0.0)
            old_logprobs = logprobs.detach()  # (2, 1)
            loss, _ = reinforce_baseline.policy_loss(
                args, logprobs, old_logprobs, old_logprobs, advantages[:, None], mask, num_seqs=1
            )
            # The minus turns the gradient of the loss into that of J, the mean reward.
            return -torch.autograd.grad(loss, theta)[0]

        # The gradients of log pi.
        score = gradients(torch.tensor(0.0)) - gradients(torch.tensor(1.0))  # (2,)
        weights = probabilities * score**2  # (2,)
        best = (weights * rewards[0]).sum() / weights.sum()
        cells = [f"{p}"]
        for baseline in (torch.tensor(0.0), torch.tensor(p), best):
            sampled = gradients(baseline)  # (2,)
            mean = (probabilities * sampled).sum()
            variance = (probabilities * (sampled - mean) ** 2).sum()
            cells.append(f"{variance:.4f}")
        rows.append([cells[0], f"{mean:.4f}", *cells[1:-1], f"{cells[-1]} (b = {best:.1f})"])
    header = ["p", "mean gradient of J, any b", "variance, b = 0", "b = p, the mean reward"]
    return table([*header, "best b"], rows)


def gae_table() -> str:
    """A response of four tokens that earns 1 at its end. A critic gives a value to each token."""
    values, rewards = torch.tensor([[0.5, 0.6, 0.2, 0.7]]), torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    rows = [["reward", *(f"{x:g}" for x in rewards[0])], ["V", *(f"{x:.1f}" for x in values[0])]]
    for name, gae_lambda in (
        ("A, lambda 0: each delta alone", 0.0),
        ("A, lambda 0.95", 0.95),
        ("A, lambda 1: return minus V", 1.0),
    ):
        args = ppo_rlhf.Args(gamma=1.0, gae_lambda=gae_lambda)
        advantages, _ = ppo_rlhf.compute_gae(args, rewards, values, mask)
        rows.append([name, *(number(x, 2) for x in advantages[0])])
    return table(["token", "1", "2", "3", "4"], rows)


def kl_table() -> str:
    """The estimators for a vocabulary of three tokens: mean, std, and expected gradients.

    The gradients are with respect to the logits. The policy is the one that sampled, so rho is 1.
    """
    policy, reference = torch.tensor(POLICY), torch.tensor(REFERENCE)
    logits = policy.log().requires_grad_()
    # Each token is one response.
    logprobs = logits.log_softmax(0)[:, None]  # (3, 1)
    ref_logprobs, mask = reference.log()[:, None], torch.ones(3, 1, dtype=torch.bool)

    # The mean over the policy's tokens. No gradient goes through their probabilities.
    def expected(values):
        return (policy * values).sum()

    def gradient(values):
        if not values.requires_grad:
            return torch.zeros(3)
        return torch.autograd.grad(expected(values), logits, retain_graph=True)[0]

    old = logprobs.detach()
    args = ppo_rlhf.Args(beta=1.0)
    k1 = -ppo_rlhf.kl_rewards(args, torch.zeros(3), logprobs, ref_logprobs, mask)[:, 0]  # (3,)
    # With an advantage of 0, the loss of GRPO is only its KL term, k3.
    k3 = []
    for i in range(3):
        one = slice(i, i + 1)
        loss, _ = grpo.policy_loss(
            grpo.Args(beta=1.0),
            logprobs[one],
            old[one],
            ref_logprobs[one],
            torch.zeros(1, 1),
            mask[one],
            num_seqs=1,
        )
        k3.append(loss)
    estimators = {"k1": k1, "k2": 0.5 * k1**2, "k3": torch.stack(k3)}
    ratio = (logprobs - old).exp()[:, 0]  # (3,)
    estimators["rho k3"] = ratio * estimators["k3"]
    rows = []
    for name, values in estimators.items():
        mean = expected(values.detach())
        std = expected((values.detach() - mean) ** 2).sqrt()
        in_loss = gradient(values)
        in_reward = gradient(values.detach() * logprobs[:, 0])
        cells = [f"{mean:.3f}", f"{std:.3f}"]
        cells += ["(" + ", ".join(map(number, x)) + ")" for x in (in_loss, in_reward)]
        rows.append([name, *cells])
    now = logits.log_softmax(0)
    forward = (now.exp() * (now - reference.log())).sum()
    reverse = (reference * (reference.log() - now)).sum()
    for name, exact in (("KL(pi, ref), exact", forward), ("KL(ref, pi), exact", reverse)):
        slope = torch.autograd.grad(exact, logits, retain_graph=True)[0]
        rows.append([name, f"{exact:.3f}", "", "(" + ", ".join(map(number, slope)) + ")", ""])
    return table(["", "mean", "std", "gradient, in the loss", "gradient, in the reward"], rows)


def group_table() -> str:
    """A group of 8: from rewards to gradients of the loss. All responses have ten tokens."""
    rewards = torch.tensor([REWARDS])  # (1, 8)
    advantages = grpo.compute_advantages(rewards)[0]  # (8,)
    loss, gradients = token_gradients(grpo, advantages, [10] * 8, beta=0.0)
    rows = [
        ["r - mean", *(number(x, 1) for x in rewards[0] - rewards.mean())],
        ["A = (r - mean) / std", *(number(x, 2) for x in advantages)],
        ["its share of the loss, -A / 8", *(number(-x / 8, 3) for x in advantages)],
        ["gradient of the loss by each log pi", *(number(x, 4) for x in gradients[:, 0])],
        ["the step makes its tokens", *("likelier" if x < 0 else "rarer" for x in gradients[:, 0])],
    ]
    header = ["reward", *(f"{x:.1f}" for x in REWARDS)]
    std = rewards.std()
    sums = f"The mean is {rewards.mean():.2f} and the std {std:.3f}. "
    sums += f"The loss is the sum of the shares, {abs(loss):.3f}.\n"
    return table(header, rows) + "\n" + sums


def std_table() -> str:
    """The advantages of an uneven and of an even group, without and with the std."""
    rows, sums = [], []
    for num_right in (1, 4):
        rewards = torch.tensor([[1.0] * num_right + [0.0] * (8 - num_right)])  # (1, 8)
        cells = [f"{num_right} of 8 right", f"{rewards.std():.3f}"]
        for script in (dr_grpo, grpo):
            advantages = script.compute_advantages(rewards)[0]  # (8,)
            sums.append(advantages.abs().sum())
            right, wrong = number(advantages[0]), number(advantages[-1])
            cells += [f"{right}, {wrong}", f"{sums[-1]:.2f}"]
        rows.append(cells)
    without_std, with_std = sums[0] / sums[2], sums[1] / sums[3]
    rows.append(["first row / second", "", "", f"{without_std:.2f}", "", f"{with_std:.2f}"])
    header = ["group", "std"]
    for name in ("dr_grpo.py", "grpo.py"):
        header += [f"{name}: A of a right one, of a wrong one", "sum of the eight sizes"]
    return table(header, rows)


def division_table() -> str:
    """The gradients of the loss for a right and a wrong response, whose advantages are 1 and -1."""
    rows = []
    for script, how in (
        (rloo, "1 / G"),
        (grpo, "1 / G, 1 / length"),
        (dapo, "1 / all tokens"),
        (dr_grpo, "1 / G, 1 / limit"),
    ):
        fields = {} if script is dapo else {"beta": 0.0}
        _, gradients = token_gradients(script, [1.0, -1.0], LENGTHS, **fields)
        tokens = gradients[:, 0]  # (2,)
        whole = gradients.sum(1)  # (2,)
        cells = [number(x, 4) for x in tokens] + [number(x, 2) for x in whole]
        rows.append([f"{script.SCRIPT.name}", how, *cells])
    short, long = LENGTHS
    header = ["", "factor", "a token of the right response", "a token of the wrong one"]
    return table([*header, f"all {short} right tokens", f"all {long} wrong tokens"], rows)


TABLES = {
    "baseline": baseline_table,
    "gae": gae_table,
    "kl": kl_table,
    "group": group_table,
    "std": std_table,
    "division": division_table,
}


# ==== pictures ====


RATIOS = torch.linspace(0.5, 1.5, 101)


def surrogates(advantage):
    """The clipped objective of one token at these ratios, computed by grpo.py."""
    args = grpo.Args(beta=0.0)
    old = torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    advantages = torch.full((1, 1), advantage)
    objectives = []
    for ratio in RATIOS:
        logprobs = ratio.log().view(1, 1)
        loss, _ = grpo.policy_loss(args, logprobs, old, old, advantages, mask, num_seqs=1)
        objectives.append(round(-loss.item(), 4))
    return objectives


def drawn_from() -> str:
    return digest([surrogates(1.0), surrogates(-1.0)])


def draw_clip():
    """The clipped objective of one token against its ratio, for A = 1 and A = -1."""
    figure, axes = panels(1, 2, figsize=(12, 4.2), sharex=True)
    for ax, advantage, name in zip(axes[0], (1.0, -1.0), ("A = 1", "A = -1"), strict=True):
        ax.plot(RATIOS, advantage * RATIOS, color=GRAY, linestyle=":", label="ratio times A")
        ax.plot(RATIOS, surrogates(advantage), color="C0", linewidth=2.5, label="clipped")
        ax.plot([1], [advantage], "o", color="C0")
        for bound in (1 - grpo.Args.clip_eps, 1 + grpo.Args.clip_eps):
            ax.axvline(bound, color=GRAY, linewidth=0.8, linestyle="--")
        ax.set_title(name, fontsize=13)
        ax.set_xlabel("ratio: probability now / when it was sampled", fontsize=12)
        ax.tick_params(labelsize=12)
    axes[0, 0].set_ylabel("objective, to be raised", fontsize=12)
    axes[0, 0].text(1.22, 0.95, "gained enough:\nno gradient", fontsize=12)
    axes[0, 1].text(0.52, -1.05, "rare enough:\nno gradient", fontsize=12)
    axes[0, 0].legend(fontsize=12, loc="lower right")
    save(figure, PICTURES / "clip.svg", drawn_from())


# name: column, row, heading, shapes
BOXES = {
    "question": (0, 1, "B questions", "prompt_ids (B, P)"),
    "sample": (1, 1, "G responses to each", "response_ids (N, R)\nresponse_mask (N, R)"),
    "reward": (2, 1, "each scored", "rewards (B, G)"),
    "advantage": (3, 1, "within its group", "advantages (N, 1)"),
    "policy": (0, 0, "the policy", "weights"),
    "rows": (1, 0, "n rows at a time", "prompts (n, P)\nresponses (n, R)"),
    "logprobs": (2, 0, "log-probabilities", "logprobs (n, R)\nold_, ref_ (n, R)"),
    "loss": (3, 0, "ratio, clip, mask, KL", "token_loss (n, R)\nloss ()"),
}
ARROWS = [("question", "sample"), ("sample", "reward"), ("reward", "advantage")]
ARROWS += [("sample", "rows"), ("rows", "logprobs"), ("logprobs", "loss"), ("advantage", "loss")]


def draw_step():
    """How the data go through one step of grpo.py, with their shapes."""
    figure, axes = panels(1, 1, figsize=(12, 4.2))
    ax = axes[0, 0]
    ax.set_axis_off()
    ax.set_xlim(-0.5, 3.5)
    ax.set_ylim(-0.75, 1.45)
    width, height = 0.37, 0.3  # half of a box

    def arrow(start, end, color=GRAY):
        style = dict(arrowstyle="-|>", color=color, linewidth=1.5, shrinkA=0, shrinkB=0)
        ax.annotate("", end, start, arrowprops=style)

    for column, row, heading, shapes in BOXES.values():
        corners_x = [column + width * side for side in (-1, 1, 1, -1, -1)]
        corners_y = [row + height * side for side in (-1, -1, 1, 1, -1)]
        ax.plot(corners_x, corners_y, color=GRAY, linewidth=1)
        ax.text(column, row + 0.16, heading, ha="center", va="center", fontsize=13, weight="bold")
        ax.text(
            column, row - 0.08, shapes, ha="center", va="center", fontsize=12, family="monospace"
        )
    for start, end in ARROWS:
        (x, y), (to_x, to_y) = BOXES[start][:2], BOXES[end][:2]
        if y == to_y:
            arrow((x + width, y), (to_x - width, y))
        else:
            arrow((x, y - height), (x, to_y + height))
    # The arrow back, below all boxes: the gradient of the loss changes the weights.
    ax.plot([3, 3, 0], [-height, -0.55, -0.55], color="C0", linewidth=1.5)
    arrow((0, -0.55), (0, -height), "C0")
    ax.text(
        1.5, -0.65, "gradient of the loss, optimizer step", ha="center", color="C0", fontsize=12
    )
    arrow((0.2, height), (0.75, 1 - height), "C0")
    ax.text(0.3, 0.5, "samples", ha="right", color="C0", fontsize=12)
    save(figure, PICTURES / "step.svg", "shapes of grpo.main")


def main() -> None:
    for name, make in TABLES.items():
        fill(PAGE, name, make())
    draw_clip()
    draw_step()


if __name__ == "__main__":
    main()
