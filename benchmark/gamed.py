"""The runs of docs/lessons.md's lesson on a gamed reward: python benchmark/gamed.py --weight 0.5 --num-steps 40

This program adds a third reward to grpo.py: --weight for each character of a response. All other flags are those of
grpo.py, with the bundled defaults. The idea behind such a reward is that a longer response has thought for longer.
docs/lessons.md shows what the policy makes of it. To go on with a run of this program, give it the same --weight.
"""

import sys
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402


# Without a name, the flags of grpo.Args are --num-steps etc., and not --args.num-steps.
def train(weight: float, args: Annotated[grpo.Args, tyro.conf.arg(name="")] = grpo.BUNDLED) -> None:
    """GRPO with a third reward for the length of a response.

    Args:
        weight: reward for each character of a response
        args: the flags of grpo.py
    """

    def length_reward(completions, **columns):
        """The weight for each character."""
        return [weight * len(text) for text in completions]

    grpo.REWARDS = [grpo.accuracy_reward, grpo.format_reward, length_reward]
    # The run's folder gets a copy of this file instead of grpo.py. So grpo.py, which has no length reward, refuses to
    # go on with the run.
    grpo.SCRIPT = Path(__file__).resolve()
    grpo.main(args)


def main() -> None:
    tyro.cli(train)


if __name__ == "__main__":
    main()
