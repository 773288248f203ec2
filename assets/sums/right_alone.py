"""A task without the reward for the format, for the lesson on pass@k: 1 for a right response, 0 for any other."""

from utils.rewards import accuracy_reward

REWARDS = [accuracy_reward]
EXAMPLES = []  # the student gets the question alone
