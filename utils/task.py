"""The default task: what a response earns, and the worked examples before each question.

For another task, write a file like this one and name it with --task. A reward is a function
my_reward(completions, answer, **columns), which returns a number for each completion. It gets the
completions and each column of the data set as a list (docs/extend.md).
"""

from utils.rewards import accuracy_reward, format_reward

# The reward is the sum of these. The mean of the first one is logged as the accuracy. So it should
# give 1.0 to a right response, 0.0 to a wrong one, or a grade between them.
REWARDS = [accuracy_reward, format_reward]

# Worked examples, each a question and its answer, which --examples puts before each question. They
# show the form of a response that REWARDS ask for. (A small model imitates an example better than
# it follows a description.) So other rewards may need other examples.
EXAMPLES = [
    (
        "Tom has 12 apples. He buys 5 more, and then he eats 2. How many apples does he have now?",
        "<think>After buying, he has 12 + 5 = 17 apples. After eating, he has 17 - 2 = 15.</think>"
        "\n<answer>15</answer>",
    ),
    (
        "A box holds 4 rows of 6 eggs. How many eggs does it hold?",
        "<think>It holds 4 * 6 = 24 eggs.</think>\n<answer>24</answer>",
    ),
    (
        "Mia has 15 stickers and gives 7 of them to Ben. How many stickers does she have left?",
        "<think>She has 15 - 7 = 8 stickers left.</think>\n<answer>8</answer>",
    ),
]

# For grpo_tools.py, which takes these instead of EXAMPLES: the same with calls of its calculator. A
# task without a tool doesn't need them.
TOOL_EXAMPLES = [
    (
        EXAMPLES[0][0],
        "<think>After buying, he has <calc>12+5</calc>=17 apples. After eating, he has "
        "<calc>17-2</calc>=15.</think>\n<answer>15</answer>",
    ),
    (
        EXAMPLES[1][0],
        "<think>It holds <calc>4*6</calc>=24 eggs.</think>\n<answer>24</answer>",
    ),
    (
        EXAMPLES[2][0],
        "<think>She has <calc>15-7</calc>=8 stickers left.</think>\n<answer>8</answer>",
    ),
]
