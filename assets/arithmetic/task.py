"""The task of docs/real-model.md: the last number of a response counts, with or without tags."""

from utils.rewards import lenient_accuracy_reward

REWARDS = [lenient_accuracy_reward]
EXAMPLES = []  # the chat model gets the question alone
