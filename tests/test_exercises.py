"""exercises/make.py: grpo.py has the lines of the holes, right answers pass, and a wrong answer gets its sentence."""

import importlib.util
import re

import pytest
from conftest import ROOT

PATH = ROOT / "exercises" / "make.py"
spec = importlib.util.spec_from_file_location("make", PATH)
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
GRPO = (ROOT / "grpo.py").read_text(encoding="utf-8")
RLOO = (ROOT / "rloo.py").read_text(encoding="utf-8")
GRADES = dict(enumerate(make.EXERCISES.values(), 1))


def solutions():
    """The lines that each hole stands for, in the order of HOLES."""
    return [make.find(RLOO if text[0] == "6" else GRPO, *ends) for text, *ends in make.HOLES]


def fill(tmp_path, changes):
    """A student's file with the solutions, as a module. changes: the index of a hole -> other lines, or None."""
    text = make.student_file()
    for k, right in enumerate(solutions()):
        hole = re.search(rf"^( *)raise .*exercise {re.escape(make.HOLES[k][0])}.*\n", text, re.M)
        lines = right
        if k in changes:
            own = changes[k]
            lines = hole[0] if own is None else "".join(f"{hole[1]}{x}\n" for x in own.split("\n"))
        text = text.replace(hole[0], lines)
    path = tmp_path / "my_grpo.py"
    path.write_text(text, encoding="utf-8")
    return make.load(path)


def test_the_original_functions_are_right(tmp_path):
    my = fill(tmp_path, {})
    assert [make.verdict(my, grade) for grade in GRADES.values()] == ["right"] * 6


def test_the_file_is_grpo_with_holes(tmp_path, monkeypatch, capsys):
    """With the solutions it is grpo.py, with rloo.py's function as one more. It never replaces a student's work."""
    text = make.student_file()
    assert text.count("raise NotImplementedError") == len(make.HOLES) == 7
    for (sentence, *_), lines in zip(make.HOLES, solutions(), strict=True):
        hole = re.search(rf"^ *raise .*exercise {re.escape(sentence)}.*\n", text, re.M)
        text = text.replace(hole[0], lines)
    before, after = text.split("def leave_one_out(returns):\n")
    own, rest = after.split("\n\n\ndef minibatches(")
    assert before + "def minibatches(" + rest == GRPO
    assert f"def compute_advantages(returns):\n{own}\n\n\n" in RLOO
    monkeypatch.setattr(make, "STUDENT", tmp_path / "my_grpo.py")
    monkeypatch.setattr(make.sys, "argv", ["make.py"])
    make.main()
    assert make.STUDENT.read_text(encoding="utf-8") == make.student_file()
    make.STUDENT.write_text("my work", encoding="utf-8")
    with pytest.raises(SystemExit, match="may hold your work"):
        make.main()
    assert make.STUDENT.read_text(encoding="utf-8") == "my work"
    assert "my_grpo.py\n" in (ROOT / ".gitignore").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="correct HOLES"):
        make.find(GRPO, "a line that", "isn't in grpo.py")


def test_what_check_prints(tmp_path, monkeypatch, capsys):
    """A line for each exercise. A hole says so, an error says where it is, and all must be right for status 0."""
    monkeypatch.setattr(make.sys, "argv", ["make.py", "--check"])
    monkeypatch.setattr(make.sys, "path", list(make.sys.path))
    monkeypatch.setattr(make, "STUDENT", tmp_path / "my_grpo.py")
    make.STUDENT.write_text(make.student_file(), encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        make.main()
    printed = capsys.readouterr().out.splitlines()
    assert end.value.code and [line[0] for line in printed] == list("123456")
    for line, number in zip(printed, "122456", strict=True):
        assert f": a hole is left: exercise {number}: " in line
    fill(tmp_path, {0: "return rewards - mean"})
    with pytest.raises(SystemExit) as end:
        make.main()
    first, *others = capsys.readouterr().out.splitlines()
    assert "NameError in compute_advantages, my_grpo.py line " in first and end.value.code
    assert [line.split(": ")[1] for line in others] == ["right"] * 5
    fill(tmp_path, {})
    with pytest.raises(SystemExit) as end:
        make.main()
    assert not end.value.code


CENTRE = "rewards = rewards - rewards[:, :1]\nrewards = rewards - rewards.mean(1, keepdim=True)"
RATIO = "logratio = logprobs - old_logprobs\nratio = logratio.exp()"
CLIPPED = f"{RATIO}\nclipped = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps)"
KL = "x = (ref_logprobs - logprobs).exp()"
OTHERS = "others = (returns.sum(1, keepdim=True) - returns) / (returns.shape[1] - 1)"
LENGTHS = "P, R = len(prompt), len(response)"
SOFTMAX = "scale = temperature or 1.0\nlogprobs = (logits / scale).log_softmax(1)"
TOKEN = "token = torch.multinomial(logprobs.exp(), 1)[:, 0] if temperature else logprobs.argmax(1)"
RETURN = "return token, logprobs.gather(1, token[:, None])[:, 0]"
# The index of a hole, an answer, and words of the sentence. "right" is another right answer.
ANSWERS = [
    (0, f"{CENTRE}\nreturn rewards / (rewards.square().mean(1, keepdim=True).sqrt() + 1e-4)", "G - 1 (torch's"),
    (0, f"{CENTRE}\nreturn rewards", "std is missing"),
    (0, f"{CENTRE}\nreturn rewards / rewards.std(1, keepdim=True)", "add 1e-4"),
    (0, f"{CENTRE}\nreturn rewards / (rewards.var(1, keepdim=True) + 1e-4)", "not by the variance"),
    (0, "return (rewards - rewards.mean()) / (rewards.std() + 1e-4)", "a group is a row"),
    (0, "r = rewards\nreturn (r - r.mean(1, True)) / (r.std(1, keepdim=True) + 1e-4)", "exactly 0"),
    (0, f"{CENTRE}\nreturn rewards / ((rewards.square().sum(1, True) / 3).sqrt() + 1e-4)", "A of random rewards"),
    (0, f"{CENTRE}\nreturn (rewards / (rewards.std(1, keepdim=True) + 1e-4)).clamp(-3, 3)", "one 0.1 among 16"),
    (0, CENTRE.replace("rewards[:, :1]", "rewards[0, 0]") + "\n"
        "return rewards / (rewards.std(1, keepdim=True) + 1e-4)", "exactly 0"),
    (0, f"rewards = rewards.clamp(max=40)\n{CENTRE}\nreturn rewards / (rewards.std(1, keepdim=True) + 1e-4)",
        "5 more for all"),
    (0, "return rewards[0]", "should be [["),
    (0, "rewards -= rewards[:, :1].clone()\nrewards -= rewards.mean(1, keepdim=True)\n"
        "return rewards / (rewards.std(1, keepdim=True) + 1e-4)", "changes its input"),
    (0, "pass", "is None"),
    (1, f"{CLIPPED}\nsurrogate = -torch.minimum(ratio * advantages, clipped * advantages)", "without a minus"),
    (1, f"{CLIPPED}\nsurrogate = clipped * advantages", "not clip alone"),
    (1, f"{CLIPPED}\nsurrogate = ratio * advantages", "clip is missing"),
    (1, f"{CLIPPED}\nsurrogate = torch.maximum(ratio * advantages, clipped * advantages)", "not the max"),
    (1, CLIPPED.replace("logprobs - old_logprobs", "old_logprobs - logprobs")
        + "\nsurrogate = torch.minimum(ratio * advantages, clipped * advantages)", "upside down"),
    (1, f"{CLIPPED}\nsurrogate = torch.minimum(ratio * advantages, clipped * advantages).detach()", "no gradient"),
    (1, f"{CLIPPED}\nsurrogate = torch.minimum(ratio.detach() * advantages, clipped * advantages)",
        "the gradient of this loss"),
    (1, f"{CLIPPED}\nS = torch.minimum(ratio * advantages, clipped * advantages)"
        "\nsurrogate = torch.where((ratio == clipped) & (advantages > 0), advantages, S)",
        "the loss of random responses"),
    (1, f"{RATIO}\nclipped = ratio.clamp(0.8, 1.2)\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "--clip-eps 0.3 has no effect"),
    (1, f"{RATIO}\nclipped = ratio.clamp(0.8, 1 + args.clip_eps)\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "this loss with --clip-eps 0.3"),
    (1, f"{RATIO}\nS = ratio * advantages\nratio = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps)\n"
        "surrogate = torch.minimum(S, ratio * advantages)", "policy/clip_frac_high should"),
    (1, f"{CLIPPED}\nlogratio = torch.zeros_like(logprobs)\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "policy/approx_kl should"),
    (1, f"{RATIO}\nclipped = ratio.detach().clamp(1 - args.clip_eps, 1 + args.clip_eps)\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "whole gradient"),
    (1, f"{CLIPPED}\nS = torch.minimum(ratio * advantages, clipped * advantages)\n"
        "surrogate = torch.where(ratio == clipped, S.detach(), S)", "the gradient of this loss"),
    (1, f"{CLIPPED}\nlogprobs = logratio\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "policy/entropy should"),
    (2, "loss = masked_mean(token_loss, mask)", "before the mean over sequences"),
    (2, "loss = masked_sum(token_loss, mask) / num_seqs", "not their sum"),
    (2, "loss = token_loss.mean(1).sum() / num_seqs", "padding doesn't count"),
    (2, "loss = masked_sum(token_loss, mask) / mask.shape[1] / num_seqs", "not by R"),
    (2, "loss = masked_mean(token_loss, mask, axis=1).mean()", "num_seqs"),
    (2, "loss = masked_mean(token_loss, mask, axis=1).sum() / (num_seqs if len(mask) > 1 else 1)", "micro-batches"),
    (2, "loss = ((token_loss * mask).sum(1) / mask.sum(1)).sum() / num_seqs", "right"),
    (3, "y = logprobs - ref_logprobs\nkl = torch.expm1(y) - y", "upside down"),
    (3, "kl = logprobs - ref_logprobs", "k1"),
    (3, "kl = 0.5 * (logprobs - ref_logprobs) ** 2", "k2"),
    (3, f"{KL}\nkl = x - x.log()", "- 1 is missing"),
    (3, f"{KL}\nkl = 1 - x + x.log()", "never negative"),
    (3, "logratio = ref_logprobs - logprobs\nkl = torch.expm1(logratio) - logratio", "policy/approx_kl should"),
    (3, "y = ref_logprobs - logprobs\nkl = args.beta * (torch.expm1(y) - y)", "the next line has it"),
    (3, "ref_logprobs -= logprobs\nkl = torch.expm1(ref_logprobs) - ref_logprobs", "right"),
    (3, f"{KL}\nkl = (x - 1 - x.log()).detach()", "don't detach"),
    (3, "y = ref_logprobs - logprobs\nkl = y.exp() - 1 - y", "torch.expm1"),
    (3, "y = (ref_logprobs - logprobs).clamp(-1, 1)\nkl = torch.expm1(y) - y", "without any bound"),
    (3, "y = (ref_logprobs - logprobs).clamp(-10, 10)\nkl = torch.expm1(y) - y", "without any bound"),
    (3, "y = ref_logprobs - logprobs\nkl = (torch.expm1(y) - y).mean(1, True).expand_as(y)",
        "the loss of random responses"),
    (4, f"{LENGTHS}\nflags = [False] * P + [True] * R", "LAST prompt token"),
    (4, f"{LENGTHS}\nflags = [False] * P + [True] * (R - 1) + [False]", "also predicts one"),
    (4, f"{LENGTHS}\nflags = [False] * (P - 1) + [True] * (R + 1)", "no token that counts"),
    (4, f"{LENGTHS}\nflags = [True] * (P + R - 1) + [False]", "of the prompt, only"),
    (4, f"{LENGTHS}\nflags = [False] * (P - 1) + [True] * R", "IndexError"),
    (4, f"{LENGTHS}\nflags = [0] * (P - 1) + [1] * R + [0]", "numbers for indices"),
    (4, "row = prompt + response\nk = row.index(response[0]) - 1\n"
        "flags = [k <= i < k + len(response) for i in range(len(row))]", "batch_size"),
    (4, f"{LENGTHS}\nP = min(P, 3)\nflags = [False] * (P - 1) + [True] * R + [False] * (len(prompt) - P + 1)",
        "random sequences"),
    (5, f"{SOFTMAX}\n{TOKEN}\nlogprobs = logits.log_softmax(1)\n{RETURN}", "temperature that sampled"),
    (5, f"{SOFTMAX}\n{TOKEN}\nlogprobs = logits / scale\n{RETURN}", "take the log_softmax"),
    (5, f"{SOFTMAX}\n{TOKEN}\nlogprobs = logprobs.exp()\n{RETURN}", "not probabilities"),
    (5, f"{SOFTMAX.replace('/', '*')}\n{TOKEN}\n{RETURN}", "don't multiply"),
    (5, f"{SOFTMAX}\ntoken = logprobs.argmax(1)\n{RETURN}", "likeliest one"),
    (5, f"{SOFTMAX}\n{TOKEN.replace('logprobs.', 'logits.softmax(1).log().')}\n{RETURN}", "at the temperature, too"),
    (5, f"{SOFTMAX.replace('or 1.0', '+ 1e-6')}\n{TOKEN}\n{RETURN}", "temperature 0"),
    (5, f"{SOFTMAX.replace('or 1.0', 'and min(temperature, 1.0) or 1.0')}\n{TOKEN}\n{RETURN}",
        "the log-probabilities should"),
    (5, f"{SOFTMAX}\n{TOKEN.replace('logprobs.exp()', '(logits / min(scale, 1.0)).softmax(1)')}\n{RETURN}",
        "how often each token is drawn should"),
    (5, f"{SOFTMAX}\n{TOKEN}\n{RETURN}", "right"),
    (5, f"logits /= temperature or 1.0\nlogprobs = logits - logits.logsumexp(1, True)\n{TOKEN}\n{RETURN}", "right"),
    (5, f"{SOFTMAX.replace('logits /', 'logits.double() /')}\n{TOKEN}\n{RETURN}", "int64 and float32"),
    (5, f"torch.manual_seed(0)\n{SOFTMAX}\n{TOKEN}\n{RETURN}", "don't set a seed"),
    (5, f"{SOFTMAX.replace('.log_softmax(1)', '.exp()')}\nlogprobs = (logprobs / logprobs.sum(1, True)).log()\n"
        f"{TOKEN}\n{RETURN}", "`nan`"),
    (6, "returns = returns - returns[:, :1]\nreturn returns - returns.mean(1, keepdim=True)", "own sample"),
    (6, f"{OTHERS}\nreturn others", "subtract it"),
    (6, "others = returns.sum(1, keepdim=True) - returns\nreturns -= others / (returns.shape[1] - 1)\n"
        "return returns", "changes its input"),
    (6, f"{OTHERS}\nreturn others - returns", "not the baseline minus"),
    (6, f"{OTHERS}\nreturn returns - others * (1 - 1 / returns.shape[1])", "G - 1"),
    (6, f"{OTHERS}\nreturn (returns - others) / (returns.std(1, keepdim=True) + 1e-4)", "by the std"),
    (6, f"{OTHERS}\nreturn returns - others", "exactly 0"),
    (6, "returns = returns - returns[:, :1]\nreturn 4 / 3 * (returns - returns.mean(1, keepdim=True))",
        "A of random returns"),
]  # fmt: skip


@pytest.mark.parametrize(("hole", "answer", "words"), ANSWERS, ids=range(len(ANSWERS)))
def test_a_wrong_answer_gets_its_sentence(tmp_path, hole, answer, words):
    my = fill(tmp_path, {hole: answer})
    number = int(make.HOLES[hole][0][0])
    text = make.verdict(my, GRADES[number])
    assert words in text and (text == "right") == (words == "right")
