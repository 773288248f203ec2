"""Reading the cells of a data set. Standard library only."""

from utils.rewards import find_numbers, gold_number


def cell_text(cell) -> str:
    """A cell of an answer column as text; "" if it is neither text nor an exact number.

    A fraction that was stored in 32 bits, or a number of more than 15 digits that was read as a
    float, is no longer what was written.
    """
    if isinstance(cell, float):
        text = f"{cell:.15g}"
        return text if float(text) == cell else ""
    return str(cell) if type(cell) in (str, int) else ""


def cell_messages(cell) -> list[dict]:
    """A cell of a question column as chat messages; a plain text is one, a blank cell none.

    Raises ValueError for a list that isn't a chat, or that ends with the assistant's own answer.
    """
    messages = cell if isinstance(cell, list) else [{"role": "user", "content": cell_text(cell)}]
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise ValueError(f"messages need a role and a content, a text: {str(message)[:100]}")
    if not messages or not messages[-1]["content"].strip():
        return []
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's, and would give the answer away")
    return messages


def describe_answers(answers: list[str]) -> str:
    """How gold answers are read: the first three, and how many are ambiguous.

    An answer is ambiguous if it has several numbers and no "####": its last number counts.
    """
    read = [f"{answer!r} is {gold_number(answer)}" for answer in answers[:3]]
    several = sum("####" not in text and len(find_numbers(text)) > 1 for text in answers)
    return (
        f"gold answers: {', '.join(read)}; {several} have several numbers, and the last one counts"
    )
