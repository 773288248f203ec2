"""exercises/make.py: grpo.py has the lines of the holes, right answers pass, and a wrong answer gets its sentence.

A file is graded in a process of its own: whatever it does, it gets a line, and so do the files after it.
"""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, load_patched

sys.path.insert(0, str(ROOT / "exercises"))

import grade  # noqa: E402
import make  # noqa: E402

GRPO = (ROOT / "grpo.py").read_text(encoding="utf-8")
RLOO = (ROOT / "rloo.py").read_text(encoding="utf-8")
GRADES = dict(enumerate(grade.GRADES.values(), 1))
# What each hole says. Those of exercises 7 to 9 are in LOSSES.
SENTENCES = [sentence for sentence, *_ in make.HOLES] + re.findall(r'exercise (\d.*)"', make.LOSSES)

RHO = "ratio = (logprobs - old_logprobs).exp()\n"
S = "S = torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)\n"
EQUAL_S = S.replace("eps_low", "clip_eps").replace("eps_high", "clip_eps")
SEQ = "ratio = masked_mean(logprobs - old_logprobs, mask, axis=1).exp()\nadvantages = advantages[:, 0]\n"
WEIGHT = "weight = (logprobs - old_logprobs).exp().clamp(max=1 + eps_high).detach()\n"
LOSSES = [
    f"{RHO}{S}return -masked_sum(S, mask) / num_tokens",
    f"{RHO}{EQUAL_S}return -masked_sum(S, mask) / max_tokens / num_seqs",
    f"{SEQ}{S}return -S.sum() / num_seqs",
    f"{WEIGHT}return -masked_sum(weight * advantages * logprobs, mask) / num_tokens",
]


def solutions():
    """The lines that each hole stands for, in the order of SENTENCES."""
    lines = [make.find(RLOO if text[0] == "6" else GRPO, *ends) for text, *ends in make.HOLES]
    return lines + [re.sub("^", "    ", loss, flags=re.M) + "\n" for loss in LOSSES]


def solved(changes):
    """A student's file with the solutions. changes: the index of a hole -> other lines, or None for the hole."""
    text = make.student_file()
    for k, (sentence, lines) in enumerate(zip(SENTENCES, solutions(), strict=True)):
        hole = re.search(rf"^( *)raise .*exercise {re.escape(sentence)}.*\n", text, re.M)
        if k in changes:
            own = changes[k]
            lines = hole[0] if own is None else "".join(f"{hole[1]}{x}\n" for x in own.split("\n"))
        text = text.replace(hole[0], lines)
    return text


def fill(tmp_path, changes):
    """This file as a module."""
    path = tmp_path / "my_grpo.py"
    path.write_text(solved(changes), encoding="utf-8")
    return grade.load(path)


def test_the_original_functions_are_right(tmp_path):
    """Those of the scripts, and for CISPO that of the patch."""
    my = fill(tmp_path, {})
    # Its dataclasses look there, also if a my_grpo.py is hidden.
    assert sys.modules["my_grpo"] is my
    assert [grade.verdict(my, check) for check in GRADES.values()] == ["right"] * 9
    my.dapo_loss = grade.right_dapo
    my.dr_grpo_loss = grade.right_dr_grpo
    my.gspo_loss = grade.right_gspo
    cispo = load_patched("cispo")

    def cispo_loss(logprobs, old, advantages, mask, num_tokens, eps_high=4.0):
        given = logprobs, old, None, advantages, mask, num_tokens
        return cispo.policy_loss(*given, clip_eps_high=eps_high, beta=0.0)[0]

    my.cispo_loss = cispo_loss
    assert [grade.verdict(my, GRADES[k]) for k in (7, 8, 9)] == ["right"] * 3


def test_the_file_is_grpo_with_holes(tmp_path, monkeypatch, capsys):
    """With the solutions it is grpo.py, with five more functions. It never replaces a student's work."""
    assert make.student_file().count("raise NotImplementedError") == len(SENTENCES) == 11
    functions = make.LOSSES
    for sentence, lines in zip(SENTENCES[-4:], solutions()[-4:], strict=True):
        functions = functions.replace(
            f'    raise NotImplementedError("exercise {sentence}")\n', lines
        )
    before, after = solved({}).replace(functions + "\n", "").split("def leave_one_out(returns):\n")
    own, rest = after.split("\n\n\ndef minibatches(")
    assert before + "def minibatches(" + rest == GRPO
    assert f"def compute_advantages(returns):\n{own}\n\n\n" in RLOO
    monkeypatch.setattr(make, "STUDENT", tmp_path / "my_grpo.py")
    monkeypatch.setattr(sys, "argv", ["make.py"])
    make.main()
    assert make.STUDENT.read_text(encoding="utf-8") == make.student_file()
    make.STUDENT.write_text("my work", encoding="utf-8")
    with pytest.raises(SystemExit, match="may hold your work"):
        make.main()
    assert make.STUDENT.read_text(encoding="utf-8") == "my work"
    assert "my_grpo.py\n" in (ROOT / ".gitignore").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="correct HOLES"):
        make.find(GRPO, "a line that", "isn't in grpo.py")


def check(monkeypatch, *arguments):
    """The status of make.py --check with these arguments."""
    monkeypatch.setattr(sys, "argv", ["make.py", "--check", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        make.main()
    return end.value.code


def test_a_student_checks(tmp_path, monkeypatch, capfd):
    """A line for each exercise. A hole says so, an error says where it is, and prints of the file are shown."""
    monkeypatch.setattr(make, "STUDENT", tmp_path / "my_grpo.py")
    assert check(monkeypatch) == 2 and "no file" in capfd.readouterr().err
    changes = {0: "print('a look')\nreturn rewards - mean", 1: None, 6: None, 8: None}
    make.STUDENT.write_text(solved(changes), encoding="utf-8")
    assert check(monkeypatch)
    shown, first, *others = capfd.readouterr().out.splitlines()
    assert shown == "a look"
    assert "1 advantages: not yet: NameError in compute_advantages, my_grpo.py line " in first
    for name, line in zip(make.EXERCISES[1:], others, strict=True):
        number = "2" if name == "3 KL" else name[0]  # 3 needs the variables of 2
        end = f"a hole is left: exercise {number}: " if number in "267" else "right"
        assert line.startswith(f"{name}: {end}")


def test_a_teacher_checks(tmp_path, monkeypatch, capsys):
    """Whatever a file does, it gets what it has right and a line, and so do the files after it."""
    half = {0: "import grpo\nreturn grpo.compute_advantages(rewards)", 9: "import os\nos._exit(0)"}
    endless, end, right = tmp_path / "endless.py", tmp_path / "end.py", tmp_path / "right.py"
    text = "import pathlib, subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
    text += f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\nwhile True:\n    pass\n"
    endless.write_text(text, encoding="utf-8")
    end.write_text("import sys\nsys.exit(0)\n" + solved(half), encoding="utf-8")
    right.write_text(solved({}), encoding="utf-8")
    assert check(monkeypatch, endless, "--timeout", 3)
    line = capsys.readouterr().out
    assert line == f"{endless} 0/9: all stopped: the file doesn't load: no answer within 3 s\n"
    # What it started is dead, too, and waits at most for being reaped.
    state = ["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()]
    assert subprocess.run(state, capture_output=True, text=True).stdout[:1] in ("", "Z")
    assert check(monkeypatch, end, "--only", 2, 8)
    assert capsys.readouterr().out == (
        f"{end} 0/2: all stopped: the file doesn't load: SystemExit in <module>, end.py line 2: 0; "
        "as in the repository: 2\n"
    )
    end.write_text(solved(half), encoding="utf-8")
    assert check(monkeypatch, end, "--json")
    record = json.loads(capsys.readouterr().out)
    verdicts = record.pop("verdicts")
    imported, stopped = verdicts["1 advantages"], verdicts["8 GSPO"]
    assert "in compute_advantages, end.py line" in imported and "grpo has solutions" in imported
    assert stopped == "stopped: its process ended with status 0"
    others = [2, 3, 4, 5, 6, 7, 9]
    assert {name for name, text in verdicts.items() if text == "right"} == {
        make.EXERCISES[k - 1] for k in others
    }
    assert record == {
        "file": str(end),
        "points": 7,
        "of": 9,
        "right": others,
        "copied": [2, 3, 4, 5, 6],
    }
    assert make.line_of(record | {"verdicts": verdicts}) == (
        f"{end} 7/9: 2 3 4 5 6 7 9; 8 {stopped}; as in the repository: 2 3 4 5 6"
    )
    monkeypatch.chdir(tmp_path)
    assert check(monkeypatch, right.name) == 0
    line = capsys.readouterr().out
    assert line == "right.py 9/9: 1 2 3 4 5 6 7 8 9; as in the repository: 1 2 3 4 5 6\n"


def test_a_typo(tmp_path):
    """The place of a syntax error is in its own text."""
    path = tmp_path / "typo.py"
    path.write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(SyntaxError) as caught:
        grade.load(path)
    assert grade.explain(caught.value) == "SyntaxError: invalid syntax (typo.py, line 1)"
    assert make.copied(path) == []


CENTRE = "rewards = rewards - rewards[:, :1]\nrewards = rewards - rewards.mean(1, keepdim=True)"
RATIO = "logratio = logprobs - old_logprobs\nratio = logratio.exp()"
CLIPPED = f"{RATIO}\nclipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)"
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
        "the gradient by log pi"),
    (1, f"{CLIPPED}\nS = torch.minimum(ratio * advantages, clipped * advantages)"
        "\nsurrogate = torch.where((ratio == clipped) & (advantages > 0), advantages, S)",
        "the loss of random responses"),
    (1, f"{RATIO}\nclipped = ratio.clamp(0.8, 1.2)\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "clip_eps = 0.1 has no effect"),
    (1, f"{RATIO}\nclipped = ratio.clamp(0.8, 1 + clip_eps)\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "the loss at rho"),
    (1, f"{RATIO}\nS = ratio * advantages\nratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)\n"
        "surrogate = torch.minimum(S, ratio * advantages)", "policy/clip_frac_high should"),
    (1, f"{CLIPPED}\nlogratio = torch.zeros_like(logprobs)\n"
        "surrogate = torch.minimum(ratio * advantages, clipped * advantages)", "policy/approx_kl should"),
    (1, f"{RATIO}\nclipped = ratio.detach().clamp(1 - clip_eps, 1 + clip_eps)\n"
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
    (3, "y = ref_logprobs - logprobs\nkl = beta * (torch.expm1(y) - y)", "the next line has it"),
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
    (7, f"{RHO}{S}return masked_sum(S, mask) / num_tokens", "the minus is missing"),
    (7, f"{RHO}{S.replace('1 + eps_high', '1 + eps_low')}return -masked_sum(S, mask) / num_tokens", "upper bound"),
    (7, f"{RHO}{S.replace('1 - eps_low', '1 - eps_high')}return -masked_sum(S, mask) / num_tokens", "lower bound"),
    (7, f"{RHO}{S.replace('1 - eps_low, 1 + eps_high', '1 - eps_high, 1 + eps_low')}"
        "return -masked_sum(S, mask) / num_tokens", "eps_high to the upper"),
    (7, f"{RHO}{S.replace('1 - eps_low, 1 + eps_high', '0.8, 1.28')}return -masked_sum(S, mask) / num_tokens",
        "'eps_high': 0.4"),
    (7, f"{RHO}{S.replace('minimum', 'maximum')}return -masked_sum(S, mask) / num_tokens", "not the max"),
    (7, f"{RHO}S = ratio * advantages\nreturn -masked_sum(S, mask) / num_tokens", "the clip is missing"),
    (7, f"{RHO}S = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages\nreturn -masked_sum(S, mask) / num_tokens",
        "not clip alone"),
    (7, f"{RHO}{S}return -masked_mean(S, mask)", "a part of the minibatch's tokens"),
    (7, f"{RHO}{S}return -masked_mean(S, mask, axis=1).mean()", "no mean within a sequence"),
    (7, f"{RHO}{S}return -S.sum() / num_tokens", "padding doesn't count"),
    (7, f"{RHO}{S}return -masked_sum(S, mask)", "divide by num_tokens"),
    (7, f"{RHO}{S}return -masked_sum(S, mask, axis=1) / num_tokens", "a scalar tensor"),
    (7, f"{RHO}{S}return -masked_sum(S.detach(), mask) / num_tokens", "no gradient"),
    (7, f"{RHO}ratio = ratio.clamp(max=5)\n{S}return -masked_sum(S, mask) / num_tokens", "10.0"),
    (7, f"{RHO}{S}S = torch.where((ratio > 2) & (ratio < 4), 0.3 * S, S)\nreturn -masked_sum(S, mask) / num_tokens",
        "random"),
    (8, f"{RHO}{EQUAL_S}return -masked_sum(S, mask) / mask.shape[1] / num_seqs", "not by R"),
    (8, f"{RHO}{EQUAL_S}return -masked_mean(S, mask, axis=1).sum() / num_seqs", "not by the length of the response"),
    (8, f"{RHO}{EQUAL_S}return -masked_sum(S, mask, axis=1).mean() / max_tokens", "a part of the minibatch's seq"),
    (8, f"{RHO}{EQUAL_S}return -masked_sum(S, mask) / num_seqs", "max_tokens (L), too"),
    (8, f"{RHO}{EQUAL_S}return -masked_sum(S, mask) / max_tokens", "num_seqs, too"),
    (8, f"{RHO}{EQUAL_S}return -S.sum() / max_tokens / num_seqs", "padding doesn't count"),
    (9, f"{SEQ.replace('masked_mean', 'masked_sum')}{S}return -S.sum() / num_seqs", "the root is missing"),
    (9, f"{SEQ.replace('.exp()', '').replace('masked_mean(', 'masked_mean((').replace(', mask', ').exp(), mask')}{S}"
        "return -S.sum() / num_seqs", "not the arithmetic one"),
    (9, f"{RHO}{S}return -masked_mean(S, mask, axis=1).sum() / num_seqs", "a ratio for each token"),
    (9, f"{SEQ.replace('masked_mean(', '(').replace(', mask, axis=1', '')}".replace(").exp()", ").mean(1).exp()")
        + f"{S}return -S.sum() / num_seqs", "don't count the padding"),
    (9, f"{SEQ}{S}return -(S * mask.sum(1)).sum() / num_seqs", "don't add up its tokens"),
    (9, f"{SEQ}{S}return -S.mean()", "a part of the minibatch's seq"),
    (9, f"{SEQ}{S.replace('eps_high', 'eps_low')}return -S.sum() / num_seqs", "upper bound"),
    (9, f"{SEQ.replace('axis=1)', 'axis=1).detach()')}ratio = (logprobs - logprobs.detach())[:, 0].exp() * ratio\n{S}"
        "return -S.sum() / num_seqs", "the gradient of this loss"),
    (10, f"{WEIGHT}return masked_sum(weight * advantages * logprobs, mask) / num_tokens", "minus is missing"),
    (10, f"{WEIGHT.replace('.detach()', '')}return -masked_sum(weight * advantages, mask) / num_tokens",
        "log pi is missing"),
    (10, f"{WEIGHT.replace('.clamp(max=1 + eps_high)', '')}"
        "return -masked_sum(weight * advantages * logprobs, mask) / num_tokens", "isn't clipped at 1 + eps_high"),
    (10, f"{WEIGHT.replace('max=', '1 - eps_high, ')}"
        "return -masked_sum(weight * advantages * logprobs, mask) / num_tokens", "no lower bound"),
    (10, f"{RHO}S = torch.minimum(ratio * advantages, ratio.clamp(max=1 + eps_high) * advantages)\n"
        "return -masked_sum(S.detach() * logprobs, mask) / num_tokens", "take no min"),
    (10, f"{WEIGHT.replace('.detach()', '')}return -masked_sum(weight * advantages * logprobs, mask) / num_tokens",
        "detach it"),
    (10, f"{WEIGHT}return -masked_mean(weight * advantages * logprobs, mask)", "a part of the minibatch's tokens"),
    (10, f"{WEIGHT}return -masked_mean(weight * advantages * logprobs, mask, axis=1).mean()", "no mean within"),
    (10, f"{WEIGHT}return -masked_sum(weight * advantages * logprobs, mask)", "divide by num_tokens"),
    (10, f"{WEIGHT}weight = torch.where((weight > 0.6) & (weight < 0.9), 1.0, weight)\n"
        "return -masked_sum(weight * advantages * logprobs, mask) / num_tokens", "random"),
    (0, "import sys\nsys.exit(0)", "SystemExit in compute_advantages"),
    (0, "raise NotImplementedError('no kernel for this dtype')", "not yet: NotImplementedError in compute_advantages"),
    (7, f"{RHO.replace('logprobs - old_logprobs', 'old_logprobs - logprobs')}{S}"
        "return -masked_sum(S, mask) / num_tokens", "upside down"),
    (7, f"{RHO}{S}S = torch.maximum(S, -10.5 * advantages.abs())\nreturn -masked_sum(S, mask) / num_tokens", "21.0"),
    (7, f"{RHO}{S}return -masked_sum(S, mask) / (num_tokens if len(mask) > 1 else mask.sum())", "of micro-batches"),
    (7, f"logprobs -= old_logprobs\nratio = logprobs.exp()\nadvantages *= 1\n{S}"
        "return -masked_sum(S, mask) / num_tokens", "right"),
    (8, f"{RHO}{S.replace('eps_low', '0.2').replace('eps_high', '0.2')}"
        "return -masked_sum(S, mask) / max_tokens / num_seqs", "dr_grpo_loss: the loss at rho"),
    (9, f"{SEQ.replace('advantages = advantages[:, 0]', '')}{S}return -S.sum() / num_seqs", "each s times each A"),
    (9, f"{SEQ}ratio = ratio.clamp(max=1.6)\n{S}return -S.sum() / num_seqs", "the loss at rho"),
    (9, f"{SEQ}{S.replace('eps_low', '3e-4').replace('eps_high', '4e-4')}return -S.sum() / num_seqs",
        "the loss at rho"),
    (10, f"{WEIGHT.replace('max=', '0.1, ')}return -masked_sum(weight * advantages * logprobs, mask) / num_tokens",
        "the loss at rho"),
    (10, f"{WEIGHT.replace('1 + eps_high', 'eps_high')}"
        "return -masked_sum(weight * advantages * logprobs, mask) / num_tokens", "the bound is 1 + eps_high"),
    (10, f"{WEIGHT}return -masked_sum(weight * advantages * (logprobs - old_logprobs).exp(), mask) / num_tokens",
        "the other factor is log pi"),
    (10, f"{WEIGHT}return -(weight * advantages * logprobs).sum() / num_tokens", "right"),  # padding is 0
]  # fmt: skip


@pytest.mark.parametrize(("hole", "answer", "words"), ANSWERS, ids=range(len(ANSWERS)))
def test_a_wrong_answer_gets_its_sentence(tmp_path, hole, answer, words):
    my = fill(tmp_path, {hole: answer})
    text = grade.verdict(my, GRADES[int(SENTENCES[hole][0])])
    assert words in text and (text == "right") == (words == "right")
