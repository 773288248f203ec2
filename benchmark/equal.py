"""The runs of docs/lessons.md's lesson on equal rewards: python benchmark/equal.py --reward 0.3 --beta 0 --num-steps 40

This program trains grpo.py as if every response had earned the same reward. The logged rewards are the real ones. With
--rounded, the advantage is GRPO's formula as it stands in the paper, in float32. All other flags are those of grpo.py,
with the bundled defaults. To go on with a run of this program, give it the same flags.
"""

import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402


# Without a name, the flags of grpo.Args are --num-steps etc., and not --args.num-steps.
def train(
    reward: float,
    rounded: bool = False,
    args: Annotated[grpo.Args, tyro.conf.arg(name="")] = grpo.BUNDLED,
) -> None:
    """GRPO in which all responses earn the same.

    Args:
        reward: what every response earns
        rounded: compute the mean of the rewards as they are, and not of their distances to the first
        args: the flags of grpo.py
    """
    compute_advantages = grpo.compute_advantages

    def advantages_of_equal_rewards(rewards):
        rewards = torch.full_like(rewards, reward)  # (B, G)
        if rounded:
            centred = rewards - rewards.mean(1, keepdim=True)  # (B, G)
            return centred / (rewards.std(1, keepdim=True) + 1e-4)
        return compute_advantages(rewards)

    grpo.compute_advantages = advantages_of_equal_rewards
    # The run's folder gets a copy of this file instead of grpo.py.
    grpo.SCRIPT = Path(__file__).resolve()
    grpo.main(args)


def main() -> None:
    tyro.cli(train)


if __name__ == "__main__":
    main()
