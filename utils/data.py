"""Reading the cells of a data set. Standard library only."""

from utils.rewards import GOLD_READERS


def cell_text(cell) -> str:
    """The text of a cell in an answer column, or "" if the cell isn't a text or an exact number.

    A float may differ from the number that was written: 32 bits change 0.1, and 64 bits keep only
    15 digits of a longer number. From 2**53 on, a float stands for several integers. Such a float
    gives "".
    """
    if isinstance(cell, float):
        text = f"{cell:.15g}"
        return text if float(text) == cell and abs(cell) < 2**53 else ""
    return str(cell) if type(cell) in (str, int) else ""


def cell_messages(cell) -> list[dict]:
    """The chat messages of a cell in a question column.

    A plain text becomes one message, and a blank cell gives none. Raises ValueError for a list that
    isn't a chat, and for a chat that ends with the assistant's answer.
    """
    messages = cell if isinstance(cell, list) else [{"role": "user", "content": cell_text(cell)}]
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise ValueError(f"messages need a role and a content, both text: {str(message)[:100]}")
    if not messages or not messages[-1]["content"].strip():
        return []
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's and would give the answer away")
    return messages


def describe_answers(answers: list[str], functions: list) -> str:
    """The first three gold answers, and how the first function that needs them reads them."""
    readers = [GOLD_READERS[function] for function in functions if function in GOLD_READERS]
    described = []
    for text in answers[:3]:
        described.append(f"{text!r} is {readers[0](text)}" if readers else repr(text))
    return "gold answers: " + ", ".join(described)
