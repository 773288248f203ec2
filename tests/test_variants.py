"""variants/: each patch applies to today's parent without fuzz, and the patched script is right.

The tests check the formulas like test_equations.py: with numbers worked by hand, identities, and slow float64 loops
whose gradients are worked out on paper. If TRL is installed, they also compare losses with TRL's. Each variant runs two
steps of main.
"""

import difflib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import make_variants
import pytest
import torch
from conftest import ROOT, SCRIPTS, small_recipe
from test_equations import loss_of, make_args, ragged_batch
from test_errors import numbers

import dr_grpo
import grpo
import rloo
from utils.rewards import accuracy_reward, format_reward

VARIANTS = sorted(path.stem for path in (ROOT / "variants").glob("*.diff"))
# The variants that change policy_loss. The others change the advantages.
LOSSES = ["cispo", "dppo", "gmpo", "luspo", "mdpo", "sapo", "topr", "unbiased_kl", "vespo"]


def parent_of(name):
    first = (ROOT / "variants" / f"{name}.diff").read_text(encoding="utf-8").split("\n", 1)[0]
    return re.fullmatch(r"--- (\w+)\.py", first).group(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for the patched scripts, with the bundled model and 60 problems. They use the repository's utils/."""
    folder = tmp_path_factory.mktemp("variants")
    shutil.copytree(ROOT / "assets" / "adder", folder / "assets" / "adder")
    with (ROOT / "assets" / "addition" / "train.jsonl").open() as lines:
        (folder / "few.jsonl").write_text("".join(itertools.islice(lines, 60)))
    return folder


@pytest.fixture(scope="module")
def load(folder):
    """A function that returns the module of a variant."""

    def module(name):
        if name not in sys.modules:
            patch = ROOT / "variants" / f"{name}.diff"
            parent = ROOT / f"{parent_of(name)}.py"
            command = ["patch", "--fuzz=0", "-o", folder / f"{name}.py", parent, patch]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr + "run tools/make_variants.py"
            spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    yield module
    for name in VARIANTS:
        sys.modules.pop(name, None)


def changed(name):
    """Lines added plus removed: [in the module's docstring, in the code]."""
    lines = (ROOT / "variants" / f"{name}.diff").read_text(encoding="utf-8").splitlines()[2:]
    counts, in_docstring = [0, 0], True
    for line in lines:
        counts[not in_docstring] += line[:1] in "+-"
        in_docstring = in_docstring and line != ' """'
    return counts


# ---- the patches


@pytest.mark.parametrize("name", VARIANTS)
def test_it_applies_and_says_what_it_is(name, load):
    """The patch applies without fuzz (load checks this), names its paper and parent, and has no long lines."""
    source = Path(load(name).__file__).read_text(encoding="utf-8")
    docstring = source[: source.index('"""\n\nimport')]
    assert "arXiv:" in docstring[:250] and f"Parent: {parent_of(name)}.py" in docstring
    assert "Departures from the paper" in docstring and f"    python {name}.py  " in docstring
    assert max(map(len, source.splitlines())) <= 100
    ours = source.splitlines()
    theirs = (ROOT / f"{parent_of(name)}.py").read_text(encoding="utf-8").splitlines()
    patch = list(difflib.unified_diff(theirs, ours, n=0, lineterm=""))[2:]
    assert sum(line[:1] in "+-" for line in patch) == sum(changed(name))
    assert changed(name)[1] >= 1
    # Comments must stand above their code, not behind a bracket.
    assert not re.search(r"^\s*\)  #", source, re.MULTILINE)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_number_has_bounds(name, load):
    """Every numeric field has bounds, as in test_errors.py, and its default is within them."""
    script = load(name)
    assert set(script.BOUNDS) == set(numbers(script))
    for field, (lowest, highest) in script.BOUNDS.items():
        default = getattr(script.Args, field)
        assert lowest < highest
        assert default is None or lowest <= default <= highest, field


@pytest.fixture
def make(tmp_path, monkeypatch):
    """tools/make_variants.py, set up to work on a copy of grpo.py and two patches."""
    monkeypatch.setattr(make_variants, "ROOT", tmp_path)
    monkeypatch.setattr(make_variants, "FOLDER", tmp_path / "variants")
    make_variants.FOLDER.mkdir()
    for name in ("grpo.py", "variants/cispo.diff", "variants/gdpo.diff"):
        shutil.copy(ROOT / name, tmp_path / name)
    return make_variants


def change_parent(folder, old, new):
    text = (folder / "grpo.py").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (folder / "grpo.py").write_text(text.replace(old, new), encoding="utf-8")


def applied(folder, name, fuzz=0):
    command = ["patch", f"--fuzz={fuzz}", "-o", folder / "out.py", folder / "grpo.py"]
    done = subprocess.run([*command, folder / "variants" / f"{name}.diff"], capture_output=True)
    return done.returncode == 0 and (folder / "out.py").read_text(encoding="utf-8")


def test_patches_are_made_anew_when_shared_text_changed(make, tmp_path):
    """The tool updates a patch if the parent changes near a patched line.

    If the patched line itself changes, a person must update the patch.
    """
    make.main([])
    assert applied(tmp_path, "cispo") == applied(tmp_path, "cispo", fuzz=3)
    before = applied(tmp_path, "cispo")
    change_parent(tmp_path, "    accuracy_reward,\n    apply", "    apply")
    assert not applied(tmp_path, "cispo")
    make.main([])
    after = before.replace("    accuracy_reward,\n    apply", "    apply")
    assert applied(tmp_path, "cispo") == after and applied(tmp_path, "gdpo")
    change_parent(tmp_path, "ratio.clamp(1 - args.clip_eps,", "ratio.clamp(1.0 - args.clip_eps,")
    make.main([])
    assert not applied(tmp_path, "cispo") and applied(tmp_path, "gdpo")
    assert "clamp(max=1 +" in (tmp_path / "cispo.py.rej").read_text(encoding="utf-8")
    # A person resolves the conflict in cispo.py.
    (tmp_path / "cispo.py").write_text(after, encoding="utf-8")
    make.main([str(tmp_path / "cispo.py")])
    assert applied(tmp_path, "cispo") == after


# ---- losses


def loss_and_gradient(script, args, logprobs, old, ref, advantages, mask):
    logprobs = logprobs.detach().clone().requires_grad_()
    sizes = (len(mask), int(mask.sum()))
    loss, _ = loss_of(script, args, logprobs, old, ref, advantages, mask, *sizes)
    loss.backward()
    return loss.item(), logprobs.grad


HAND = [
    # Each row: variant, advantage, fields, loss, and the gradient with respect to the two log-probabilities.
    # The two tokens have ratios 1.5 and 0.5. Their old probabilities are 0.3 and 0.2. dr_grpo.py's L is 10.
    ("cispo", 2.0, dict(clip_eps_high=0.2), None, (-1.2 * 2 / 2, -0.5 * 2 / 2)),
    ("cispo", -2.0, dict(clip_eps_high=0.2), None, (1.2 * 2 / 2, 0.5 * 2 / 2)),
    # 0.3 -> 0.45 rises too far. 0.2 -> 0.1 falls, so DPPO doesn't clip it.
    ("dppo", 2.0, dict(delta=0.12), -0.5, (0.0, -0.5)),
    ("dppo", 2.0, dict(delta=0.16), -2.0, (-1.5, -0.5)),
    ("dppo", -2.0, dict(delta=0.09), 1.5, (1.5, 0.0)),
    # The geometric mean of min(1.5, e^0.2) and 0.5. An unclipped token's gradient is this mean times A / 2.
    ("gmpo", 2.0, dict(clip_eps=0.2), -2 * (0.5 * math.exp(0.2)) ** 0.5, (0.0, -((0.5 * math.exp(0.2)) ** 0.5))),
    ("gmpo", -2.0, dict(clip_eps=0.2), 2 * (1.5 * math.exp(-0.2)) ** 0.5, ((1.5 * math.exp(-0.2)) ** 0.5, 0.0)),
    # s = sqrt(0.75) is below 1 - eps_low, so only A < 0 is clipped. The loss is multiplied by the length, 2.
    ("luspo", 2.0, dict(clip_eps_low=0.1, clip_eps_high=0.1), -4 * 0.75**0.5, (-2 * 0.75**0.5,) * 2),
    ("luspo", -2.0, dict(clip_eps_low=0.1, clip_eps_high=0.1), 4 * 0.9, (0.0, 0.0)),
    # l = log 0.75; the gradient is -(A - tau l) / L.
    (
        "mdpo",
        2.0,
        dict(tau=0.5),
        (0.25 * math.log(0.75) ** 2 - 2 * math.log(0.75)) / 10,
        (-(2 - 0.5 * math.log(0.75)) / 10,) * 2,
    ),
    # 4 / tau sigmoid(tau / 2) and 4 / tau sigmoid(-tau / 2); the slope is 4 s (1 - s) times the ratio.
    (
        "sapo",
        2.0,
        dict(tau_pos=2.0, tau_neg=7.0),
        -2 * (2 / (1 + math.exp(-1)) + 2 / (1 + math.exp(1))) / 2,
        tuple(-4 * r / (1 + math.exp(-1)) / (1 + math.exp(1)) for r in (1.5, 0.5)),
    ),
    # A good response has weight 1, although its probability fell to 0.75 of the old one.
    ("topr", 2.0, {}, None, (-0.2, -0.2)),
    ("topr", -2.0, {}, None, (0.15, 0.15)),
    # phi(0.75) = 0.75^2 e^(3/4) for A > 0, 0.75^3 e^(1/2) for A < 0.
    ("vespo", 2.0, {}, None, (-(0.75**2) * math.exp(0.75),) * 2),
    ("vespo", -2.0, {}, None, (0.75**3 * math.exp(0.5),) * 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "advantage", "fields", "loss", "gradient"), HAND)
def test_losses_by_hand(name, advantage, fields, loss, gradient, load):
    old = torch.tensor([[0.3, 0.2, 9.0]], dtype=torch.float64).log()
    logprobs = old + torch.tensor([[1.5, 0.5, 7.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]])
    args = make_args(load(name), beta=0.0, **fields)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    value, slope = loss_and_gradient(load(name), args, logprobs, old, None, advantages, mask)
    assert slope.tolist()[0] == pytest.approx([*gradient, 0.0], abs=1e-12)
    # If the weight is detached, only the gradient is meaningful.
    if loss is not None:
        assert value == pytest.approx(loss, abs=1e-12)


FIELDS = dict(clip_eps_low=0.3, clip_eps_high=0.5, delta=0.1, tau=0.7, tau_pos=1.3, tau_neg=1.9)
FIELDS |= dict(k_pos=1.5, lambda_pos=2.5, k_neg=2.0, lambda_neg=1.0, beta=0.0)


def slow_gradient(name, args, logprobs, old, advantages, mask):
    """d loss / d logprobs from derivatives on paper, one token at a time, and the number of clipped terms."""
    n, total = len(mask), int(mask.sum())
    gradient, left_out = torch.zeros(mask.shape, dtype=torch.float64), 0
    for i in range(n):
        length, A = int(mask[i].sum()), advantages[i].item()
        logratios = [(logprobs[i, t] - old[i, t]).item() for t in range(length)]
        l = math.fsum(logratios)  # noqa: E741
        cut = [min(x, 0.4) if A > 0 else max(x, -0.4) for x in logratios]
        for t, x in enumerate(logratios):
            rho = math.exp(x)
            if name == "cispo":
                weight = min(rho, 1.5) / total
                left_out += rho > 1.5
            elif name == "dppo":
                moved = math.exp(logprobs[i, t].item()) - math.exp(old[i, t].item())
                out = moved > 0.1 if A > 0 else moved < -0.1
                left_out += out
                weight = 0.0 if out else rho / total
            elif name == "gmpo":
                weight = math.exp(math.fsum(cut) / length) / length / n if cut[t] == x else 0.0
                left_out += cut[t] != x
            elif name == "luspo":
                s = math.exp(l / length)
                out = s > 1.5 if A > 0 else s < 0.7
                left_out += out
                weight = 0.0 if out else s / n
            elif name == "mdpo":
                weight = (1 - 0.7 * l / A) / 10 / n
            elif name == "sapo":
                tau = 1.3 if A > 0 else 1.9
                gate = 1 / (1 + math.exp(-tau * (rho - 1)))
                weight = 4 * gate * (1 - gate) * rho / length / n
            elif name == "topr":
                weight = (1.0 if A >= 0 else min(1.0, math.exp(l))) / 10 / n
                left_out += A < 0 and l < 0
            elif name == "unbiased_kl":
                out = rho > 1.2 if A > 0 else rho < 0.8
                left_out += out
                weight = 0.0 if out else rho / length / n
            elif name == "vespo":
                k, lam = (1.5, 2.5) if A >= 0 else (2.0, 1.0)
                weight = math.exp(l) ** k * math.exp(lam * (1 - math.exp(l))) / total
            gradient[i, t] = -A * weight
    return gradient, left_out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_against_a_slow_loop(name, seed, load):
    """The batch is ragged and has garbage in the masked slots."""
    script = load(name)
    logprobs, old, _, advantages, mask = ragged_batch(seed)
    args = make_args(script, **FIELDS)
    expected, left_out = slow_gradient(name, args, logprobs, old, advantages, mask)
    assert left_out > 0 or name in ("mdpo", "sapo", "vespo")
    _, gradient = loss_and_gradient(script, args, logprobs, old, None, advantages, mask)
    assert torch.allclose(gradient, expected, atol=1e-12, rtol=1e-10)
    # These two also log the number of clipped tokens.
    if name in ("cispo", "dppo"):
        sizes = (len(mask), int(mask.sum()))
        _, stats = loss_of(script, args, logprobs, old, None, advantages, mask, *sizes)
        assert stats["policy/clip_frac"] == left_out
    # An advantage of 0 clips nothing.
    if name == "dppo":
        _, stats = loss_of(script, args, logprobs, old, None, 0 * advantages, mask, *sizes)
        assert stats["policy/clip_frac"] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_stats_are_sums_over_tokens_that_count(name, load):
    """Worked by hand, as in test_equations.py. The log-ratios are 0.5, -0.5, 0.1 and -0.1, 0.0."""
    logprobs = torch.tensor([[0.5, -0.5, 0.1, 9.0], [-0.1, 0.0, 7.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    script, old = load(name), torch.zeros_like(logprobs)
    args = make_args(script, **FIELDS | dict(clip_eps=0.4, clip_eps_high=0.2))
    _, stats = loss_of(script, args, logprobs, old, None, torch.ones(2, 1), mask, 2, 5)
    ratios = [math.exp(x) for x in (0.5, -0.5, 0.1, -0.1, 0.0)]
    if name == "luspo":
        ratios = 3 * [math.exp(0.1 / 3)] + 2 * [math.exp(-0.05)]
    assert stats["policy/approx_kl"].item() == pytest.approx(0.5 * (0.25 + 0.25 + 0.01 + 0.01))
    assert stats["policy/ratio_mean"].item() == pytest.approx(sum(ratios))
    assert stats["policy/entropy"].item() == pytest.approx(0.0)
    clipped = {
        # exp(0.5) is above 1.2.
        "cispo": dict(clip_frac=1),
        # exp(0.5) and exp(0.1) are more than 0.1 above 1.
        "dppo": dict(clip_frac=2),
        # The log-ratios 0.5 and -0.5 are outside -0.4 .. 0.4.
        "gmpo": dict(clip_frac_low=1, clip_frac_high=1, clip_frac=2),
        # Both sequences' ratios are within 0.7 .. 1.2.
        "luspo": dict(clip_frac_low=0, clip_frac_high=0, clip_frac=0),
        # exp(0.5) is above 1.4, and exp(-0.5) is within 0.6 .. 1.4.
        "unbiased_kl": dict(clip_frac_low=0, clip_frac_high=1, clip_frac=1),
    }.get(name, {})
    logged = {key: value for key, value in stats.items() if "clip_frac" in key}
    assert logged == {f"policy/{key}": value for key, value in clipped.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_shapes_that_would_broadcast_silently_are_refused(name, load):
    script, values = load(name), torch.zeros(3, 3)
    args, mask = make_args(script, beta=0.0), torch.ones(3, 3, dtype=torch.bool)
    for bad in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(3, 2), torch.zeros(3, 3)):
        with pytest.raises(AssertionError):
            loss_of(script, args, values, values, None, bad, mask, 3, 9)
    with pytest.raises(AssertionError):
        loss_of(script, args, values, values[:1], None, torch.zeros(3, 1), mask, 3, 9)


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_slices_add_up(name, load):
    """The memory budget doesn't change the gradient. The KL term has the policy term's divisor.

    The KL term is GRPO's, except in unbiased_kl.
    """
    script = load(name)
    logprobs, old, ref, advantages, mask = ragged_batch(3)
    args = make_args(script, **FIELDS | dict(beta=0.3))
    whole, gradient = loss_and_gradient(script, args, logprobs, old, ref, advantages, mask)
    parts, slices = [], (slice(0, 1), slice(1, 4), slice(4, 6))
    for rows in slices:
        part = logprobs[rows].detach().clone().requires_grad_()
        given = (old[rows], ref[rows], advantages[rows], mask[rows])
        loss, _ = loss_of(script, args, part, *given, len(mask), int(mask.sum()))
        (slope,) = torch.autograd.grad(loss, part)
        parts.append((loss.item(), slope))
    assert math.fsum(loss for loss, _ in parts) == pytest.approx(whole, abs=1e-12)
    assert torch.allclose(torch.cat([slope for _, slope in parts]), gradient, atol=1e-12)
    without = loss_and_gradient(
        script, make_args(script, **FIELDS), logprobs, old, None, advantages, mask
    )
    lengths = mask.sum(1, keepdim=True)
    share = {"gmpo": lengths * 6, "sapo": lengths * 6, "luspo": 6, "mdpo": 60, "topr": 60}
    share |= {"unbiased_kl": lengths * 6}
    # The gradient of beta times k3.
    slope = 0.3 * (1 - (ref - logprobs.detach()).masked_fill(~mask, 0.0).exp())
    if name == "unbiased_kl":
        slope = 0.3 * (logprobs.detach() - old).exp() * (logprobs.detach() - ref)
    expected = slope / share.get(name, int(mask.sum()))
    assert torch.allclose(gradient - without[1], expected.masked_fill(~mask, 0.0), atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_old_policy_the_gradient_is_the_stated_multiple_of_grpos(name, load):
    logprobs, _, _, advantages, mask = ragged_batch(2)
    same = logprobs.detach().clone()
    script, args = load(name), make_args(load(name), beta=0.0)
    _, gradient = loss_and_gradient(script, args, same, same, None, advantages, mask)
    plain = grpo if name not in ("mdpo", "topr") else dr_grpo
    given = (make_args(plain, beta=0.0), same, same, None, advantages, mask)
    _, expected = loss_and_gradient(plain, *given)
    lengths = mask.sum(1, keepdim=True)  # (n, 1)
    if name in ("cispo", "dppo", "vespo"):
        # These variants average over all tokens. GRPO averages over each response.
        expected = expected * lengths * len(mask) / mask.sum()
    elif name == "luspo":
        expected = expected * lengths
    assert torch.allclose(gradient, expected, atol=1e-12) and gradient.abs().max() > 0.01


# ---- against TRL


@pytest.fixture(scope="module")
def trl():
    """TRL's trainers. The tests use only their loss, on given log-probabilities."""
    # TRL would warn that its experimental trainers may change.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", reason="benchmark/requirements.txt has TRL")
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    return {"gmpo": GMPOTrainer, "grpo": GRPOTrainer}


class Lists(dict):
    """A place for TRL's metrics, which no test reads."""

    def __missing__(self, name):
        return self.setdefault(name, [])


def trl_loss(trainer_class, loss_type, given, logprobs, old, advantages, mask, ref=None):
    """The loss from _compute_loss of TRL 1.16 in evaluation mode, which doesn't accumulate gradients.

    With ref, the reference's log-probabilities, the KL is TRL's default: the one of DeepSeek-V3.2.
    """
    trainer = trainer_class.__new__(trainer_class)
    args = dict(delta=None, use_bias_correction_kl=ref is not None)
    args |= dict(sapo_temperature_pos=1.3, sapo_temperature_neg=1.9)
    args |= dict(vespo_k_pos=1.5, vespo_lambda_pos=2.5, vespo_k_neg=2.0, vespo_lambda_neg=1.0)
    fields = dict(loss_type=loss_type, beta=0.0, args=SimpleNamespace(**args), use_vllm=False)
    fields |= dict(top_entropy_quantile=1.0, off_policy_mask_threshold=None)
    fields |= dict(importance_sampling_level="token", epsilon_low=0.0, epsilon_high=0.0)
    fields |= dict(aux_loss_enabled=False, _entropy_bonus_enabled=False)
    fields |= dict(model=SimpleNamespace(training=False), _metrics={"eval": Lists()})
    fields["accelerator"] = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    given_logprobs = (logprobs, torch.zeros_like(old), None)
    fields["_get_per_token_logps_and_entropies"] = lambda *args, **kwargs: given_logprobs
    fields["current_gradient_accumulation_steps"] = 1
    vars(trainer).update(fields | given)
    inputs = {name: torch.zeros(len(mask), 1) for name in ("prompt_ids", "prompt_mask")}
    inputs |= dict(completion_ids=torch.zeros(mask.shape), completion_mask=mask.long())
    inputs |= dict(advantages=advantages[:, 0], old_per_token_logps=old)
    inputs |= dict(num_items_in_batch=mask.sum(), ref_per_token_logps=ref)
    return trainer._compute_loss(trainer.model, inputs)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        # TRL's epsilon_high is the bound itself, not its distance from 1.
        ("cispo", dict(epsilon_high=1.5)),
        ("sapo", {}),
        ("luspo", dict(epsilon_low=0.3, epsilon_high=0.5, importance_sampling_level="sequence")),
        ("vespo", {}),
        ("gmpo", dict(epsilon_low=0.4, epsilon_high=0.4)),
    ],
)
def test_losses_against_trl(name, given, load, trl):
    """Loss and gradient agree with TRL's. TRL multiplies by the mask, so masked slots must not contain garbage."""
    logprobs, old, _, advantages, mask = ragged_batch(4)
    logprobs, old = (x.detach().masked_fill(~mask, -1.0) for x in (logprobs, old))
    args = make_args(load(name), **FIELDS)
    mine = loss_and_gradient(load(name), args, logprobs, old, None, advantages, mask)
    logprobs.requires_grad_()
    loss = trl_loss(trl.get(name, trl["grpo"]), name, given, logprobs, old, advantages, mask)
    loss.backward()
    # TRL's temperatures are float32, hence the tolerance.
    assert mine[0] == pytest.approx(loss.item(), abs=1e-6)
    assert torch.allclose(mine[1], logprobs.grad, atol=1e-6)


# ---- unbiased_kl


def test_the_unbiased_kl_is_trls_default(load, trl):
    """Loss and gradient agree with TRL's, and GRPO's gradient doesn't."""
    logprobs, old, ref, advantages, mask = ragged_batch(4)
    logprobs, old, ref = (x.detach().masked_fill(~mask, -1.0) for x in (logprobs, old, ref))
    fields = dict(beta=0.3, clip_eps=0.2)
    mine, grpos = (
        loss_and_gradient(script, make_args(script, **fields), logprobs, old, ref, advantages, mask)
        for script in (load("unbiased_kl"), grpo)
    )
    logprobs.requires_grad_()
    given = dict(beta=0.3, epsilon_low=0.2, epsilon_high=0.2)
    loss = trl_loss(trl["grpo"], "grpo", given, logprobs, old, advantages, mask, ref)
    loss.backward()
    assert mine[0] == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(mine[1], logprobs.grad, atol=1e-12)
    assert not torch.allclose(mine[1], grpos[1], atol=1e-2)
    from trl import GRPOConfig

    assert GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True


def test_the_unbiased_kl_by_hand(load):
    """pi = 1/2, pi_old = 1/4 and pi_ref = 1/8: rho is 2, and k3 is 1/4 - 1 + log 4."""
    script, one = load("unbiased_kl"), torch.ones(1, 1, dtype=torch.bool)
    logprobs, old, ref = (torch.tensor([[x]]).double().log() for x in (1 / 2, 1 / 4, 1 / 8))
    logprobs.requires_grad_()
    args, zero = make_args(script, beta=0.1), torch.zeros(1, 1, dtype=torch.float64)
    loss, stats = loss_of(script, args, logprobs, old, ref, zero, one, 1, 1)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * 2 * (math.log(4) - 3 / 4), abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(0.1 * 2 * math.log(4), abs=1e-12)
    assert stats["kl/ref"].item() == pytest.approx(2 * (math.log(4) - 3 / 4), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_unbiased_kl_against_a_slow_loop(seed, load):
    """The batch is ragged and has garbage in the masked slots. No KL term is clipped."""
    script = load("unbiased_kl")
    logprobs, old, ref, advantages, mask = ragged_batch(seed)
    args = make_args(script, beta=0.3)
    loss, gradient = loss_and_gradient(script, args, logprobs, old, ref, advantages, mask)
    expected, clipped = slow_gradient("unbiased_kl", args, logprobs, old, advantages, mask)
    terms = []
    for i, t in mask.nonzero().tolist():
        new, A, share = logprobs[i, t].item(), advantages[i].item(), 6 * int(mask[i].sum())
        rho, x = math.exp(new - old[i, t].item()), math.exp(ref[i, t].item() - new)
        surrogate = min(rho * A, min(max(rho, 0.8), 1.2) * A)
        terms.append((0.3 * rho * (x - 1 - math.log(x)) - surrogate) / share)
        expected[i, t] -= 0.3 * rho * math.log(x) / share
    assert clipped > 0 and loss == pytest.approx(math.fsum(terms), abs=1e-12)
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("sampler", [(0.7, 0.2, 0.1), (0.3, 0.3, 0.4)])
def test_the_unbiased_kl_has_the_gradient_of_the_true_one(sampler, load):
    """The example of docs/algorithms.md. The old policy is the policy itself, or another one.

    For each sample, the gradient of rho k3 is rho times that of k2. Its mean over the old policy's
    samples is the gradient of KL(pi || pi_ref).
    """
    given = (sampler, (0.4, 0.4, 0.2), (0.7, 0.2, 0.1))
    old, reference, policy = (torch.tensor(x, dtype=torch.float64) for x in given)
    logits = policy.log().requires_grad_()
    logprobs, one = logits.log_softmax(0), torch.ones(1, 1, dtype=torch.bool)

    def slope(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def kl_terms(script):
        """The KL term of each of the three tokens, (3,)."""
        args, zero, terms = make_args(script, beta=1.0), torch.zeros(1, 1).double(), []
        for token in range(3):
            each = (x[token].view(1, 1) for x in (logprobs, old.log(), reference.log()))
            terms.append(loss_of(script, args, *each, zero, one, 1, 1)[0])
        return torch.stack(terms)

    terms, k3 = kl_terms(load("unbiased_kl")), kl_terms(grpo)
    ratios, k2 = (logprobs - old.log()).exp(), 0.5 * (logprobs - reference.log()) ** 2
    for token in range(3):
        expected = ratios[token].detach() * slope(k2[token])
        assert torch.allclose(slope(terms[token]), expected, atol=1e-12)
        # With a gradient through the ratio, rho k2 has another one.
        assert not torch.allclose(slope(ratios[token] * k2[token]), expected, atol=1e-3)
    true = (logprobs.exp() * (logprobs - reference.log())).sum()
    assert (old * terms).sum().item() == pytest.approx(true.item(), abs=1e-12)
    assert torch.allclose(slope((old * terms).sum()), slope(true), atol=1e-12)
    # GRPO's term has another mean gradient. If the policy samples, it is that of KL(pi_ref || pi).
    assert not torch.allclose(slope((old * k3).sum()), slope(true), atol=1e-2)
    other = (reference * (reference.log() - logprobs)).sum()
    on_policy = torch.allclose(old, logprobs.exp())
    assert torch.allclose(slope((old * k3).sum()), slope(other), atol=1e-12) == on_policy
    # A ratio without a gradient corrects for the other sampler alone. rho k2 has the gradient of another mean.
    stopped = slope((old * ratios.detach() * k3).sum())
    assert torch.allclose(stopped, slope(other), atol=1e-12)
    weighted, mean = slope((old * ratios * k2).sum()), slope((logprobs.exp() * k2).sum())
    assert torch.allclose(weighted, mean, atol=1e-12)
    assert not torch.allclose(mean, slope(true), atol=1e-2)


# ---- p3o


def test_p3o_by_hand(load):
    """Only the first response is right. The log-ratios are 0.1, 0 and 0.3."""
    script = load("p3o")
    returns = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    logratio = torch.tensor([[0.1, 0.0, 0.3]], dtype=torch.float64)
    near, far = math.exp(0.1 + 0.0), math.exp(0.1 + 0.3)

    def advantages(eps, moved=logratio):
        args = make_args(script, clip_eps=eps)
        return script.compute_advantages(args, returns, moved)[0].tolist()

    assert advantages(0.11) == pytest.approx([(near + far) / 2, -near / 2, -far / 2], abs=1e-12)
    # The first response has gained 0.1 on the second one, and lost 0.2 to the third one.
    assert advantages(0.09) == pytest.approx([far / 2, 0.0, -far / 2], abs=1e-12)
    # Now it has lost 0.1 to the second one, and gained 0.2 on the third one.
    assert advantages(0.15, -logratio) == pytest.approx([1 / near / 2, -1 / near / 2, 0.0])
    for bad in (torch.zeros(3, 1), torch.zeros(1, 1), torch.zeros(3)):
        with pytest.raises(AssertionError):
            script.compute_advantages(make_args(script), returns, bad)


def p3o_batch(seed):
    """One group of six responses: log-probabilities (6, 7) near the old ones, and rewards (1, 6)."""
    logprobs, old, ref, _, mask = ragged_batch(seed)
    logprobs = old + 0.1 * (logprobs.detach() - old)
    rewards = torch.rand(1, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logprobs, old, ref, rewards, mask


def p3o_gradient(script, args, logprobs, old, ref, rewards, mask):
    """The gradient (6, 7) of the loss of one update, from the script's three functions."""
    returns = script.compute_returns(args, rewards, old, ref, mask)
    logratio = torch.where(mask, logprobs - old, 0.0).sum(1).view(1, -1)
    advantages = script.compute_advantages(args, returns, logratio).view(-1, 1)
    return loss_and_gradient(script, args, logprobs, old, ref, advantages, mask)[1]


@pytest.mark.parametrize("seed", range(3))
def test_p3o_against_its_objective_pair_by_pair(seed, load):
    """Autograd of the clipped objective, with the weight of each pair as a plain number."""
    script, beta, eps = load("p3o"), 0.3, 0.1
    logprobs, old, ref, rewards, mask = p3o_batch(seed)
    args = make_args(script, beta=beta, clip_eps=eps)
    gradient = p3o_gradient(script, args, logprobs, old, ref, rewards, mask)
    clean = logprobs.masked_fill(~mask, 0.0).requires_grad_()
    of_policy, of_old, of_ref = (torch.where(mask, x, 0.0).sum(1) for x in (clean, old, ref))
    R = (rewards[0] - beta * (of_old - of_ref)).tolist()
    rho = [math.exp((of_policy[i] - of_old[i]).item()) for i in range(6)]
    objective, clipped = 0.0, 0
    for i, j in itertools.combinations(range(6), 2):
        weight = (R[i] - R[j]) * rho[i] * rho[j]
        x, center = of_policy[i] - of_policy[j], (of_old[i] - of_old[j]).item()
        limited = x.clamp(center - eps, center + eps)
        objective = objective + torch.minimum(weight * x, weight * limited) / 2 / 15
        clipped += (weight * limited < weight * x).item()
    (expected,) = torch.autograd.grad(-objective, clean)
    assert torch.allclose(gradient, expected, atol=1e-12) and gradient.abs().max() > 0.01
    assert 0 < clipped < 15


def test_p3o_without_its_clip_is_theorem_1(load):
    """Over all pairs of the old policy's samples, the mean gradient is that of the expected reward."""
    script, one = load("p3o"), torch.ones(2, 1, dtype=torch.bool)
    args = make_args(script, beta=0.0, clip_eps=1e9)
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.5, 0.1, 0.4], dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([1.0, 0.4, 0.2], dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    logprobs, mean, theorem = logits.log_softmax(0), 0.0, 0.0
    for pair in itertools.product(range(3), repeat=2):
        new, before = logprobs[list(pair)].view(2, 1), old[list(pair)].view(2, 1)
        r, rho = rewards[list(pair)], (new - before).exp().detach()[:, 0]
        advantages = script.compute_advantages(args, r[None], (new - before).detach().T)
        given = (new, before, None, advantages.T, one, 2, 2)
        loss, _ = loss_of(script, args, *given)
        probability = before.sum().exp()
        mean = mean - probability * loss
        theorem = theorem + probability * (r[0] - r[1]) * rho.prod() * (new[0] - new[1]).sum() / 2
    for value in (mean, theorem):
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert torch.allclose(gradient, exact, atol=1e-12)
    assert exact.abs().max() > 0.05


def test_p3o_knows_only_differences_and_starts_as_rloo(load):
    """A shift of all returns changes nothing, and the advantages of a group add up to 0."""
    script, args = load("p3o"), make_args(load("p3o"), clip_eps=0.2)
    generator = torch.Generator().manual_seed(0)
    returns, moved = torch.rand(2, 3, 5, generator=generator, dtype=torch.float64)
    advantages = script.compute_advantages(args, returns, moved)
    assert torch.allclose(script.compute_advantages(args, returns + 7, moved), advantages)
    assert torch.allclose(advantages.sum(1), torch.zeros(3).double(), atol=1e-12)
    at_start = script.compute_advantages(args, returns, torch.zeros(3, 5).double())
    assert torch.allclose(at_start, rloo.compute_advantages(args, returns), atol=1e-12)
    assert not torch.allclose(at_start, advantages, atol=0.1)
    # Equal returns give exactly 0. A weight is finite, also if the ratios aren't.
    equal, huge = torch.full((1, 3), 0.1), torch.full((1, 3), 300.0)
    assert (script.compute_advantages(args, equal, huge) == 0).all()
    assert script.compute_advantages(args, torch.tensor([[1.0, 0.0, 0.5]]), huge).isfinite().all()


# ---- advantages


def test_advantages_by_hand(load):
    rewards = torch.tensor(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4]
    ).double()
    maxrl = load("maxrl").compute_advantages(make_args(load("maxrl")), rewards)
    expected = [[3.0, -1.0, -1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4]
    assert maxrl.tolist() == expected
    # The centred rewards are 3/4, three times -1/4, twice 1/2, twice -1/2, and zeros. Their squares add up to
    # 3/4 + 1. The std divides this sum by 16 - 1.
    std = (1.75 / 15) ** 0.5 + 1e-4
    plus = load("reinforce_pp").compute_advantages(make_args(load("reinforce_pp")), rewards)
    centred = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0.0] * 4, [0.0] * 4]
    assert torch.allclose(plus, torch.tensor(centred).double() / std, atol=1e-12)
    lengths = torch.tensor([[3, 1, 1, 1], [1, 2, 3, 4], [5] * 4, [1, 2, 3, 4]])
    opo = load("opo").compute_advantages(make_args(load("opo")), rewards, lengths)
    baseline = torch.tensor([[0.5], [0.3], [0.0], [1.0]]).double()
    assert torch.allclose(opo, rewards - baseline, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_against_slow_loops(seed, load):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)  # (K, B, G)
    lengths = torch.randint(1, 9, (3, 4), generator=generator)
    rewards = scores[0]

    def mean_and_std(values):
        mean = math.fsum(values) / len(values)
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))

    def advantages(name, *given):
        return load(name).compute_advantages(make_args(load(name)), *given).flatten().tolist()

    centred, opo, maxrl, sums = [], [], [], [0.0] * 12
    for b, row in enumerate(rewards.tolist()):
        mean = math.fsum(row) / 4
        centred += [x - mean for x in row]
        maxrl += [x / mean - 1 for x in row]
        weights = [n / int(lengths[b].sum()) for n in lengths[b].tolist()]
        opo += [x - math.fsum(w * y for w, y in zip(weights, row, strict=True)) for x in row]
    for k, b in itertools.product(range(2), range(3)):
        mean, std = mean_and_std(scores[k, b].tolist())
        for g in range(4):
            sums[4 * b + g] += (scores[k, b, g].item() - mean) / (std + 1e-4)
    mean, std = mean_and_std(sums)
    spread = mean_and_std(centred)[1] + 1e-4
    assert advantages("maxrl", rewards) == pytest.approx(maxrl, abs=1e-12)
    assert advantages("opo", rewards, lengths) == pytest.approx(opo, abs=1e-12)
    assert advantages("reinforce_pp", rewards) == pytest.approx([x / spread for x in centred])
    assert advantages("gdpo", scores) == pytest.approx([(x - mean) / (std + 1e-4) for x in sums])


def test_advantages_where_they_are_those_of_the_parent(load):
    """With equal lengths OPO equals Dr. GRPO, and with one group REINFORCE++ equals GRPO.

    With one group and one reward GDPO equals GRPO, except for a second 1e-4.
    """
    rewards = torch.rand(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    opo = load("opo").compute_advantages(make_args(load("opo")), rewards, torch.full((3, 4), 7))
    assert torch.allclose(opo, dr_grpo.compute_advantages(make_args(dr_grpo), rewards), atol=1e-12)
    one = rewards[:1]
    expected = grpo.compute_advantages(make_args(grpo), one)
    plus = load("reinforce_pp").compute_advantages(make_args(load("reinforce_pp")), one)
    assert torch.allclose(plus, expected, atol=1e-12)
    gdpo = load("gdpo").compute_advantages(make_args(load("gdpo")), one[None])
    assert torch.allclose(gdpo, expected, atol=1e-3) and not torch.equal(gdpo, expected)
    for name, given in (("reinforce_pp", one), ("gdpo", one[None])):
        # Equal rewards give exactly 0, even if their mean is rounded.
        equal = torch.full_like(given, 0.1, dtype=torch.float32)
        assert (load(name).compute_advantages(make_args(load(name)), equal) == 0).all()


def test_maxrl_is_unbiased_for_the_series_of_log_p(load):
    """The expected gradient over all groups of G responses equals the gradient of the series' first G - 1 terms."""
    script, p = load("maxrl"), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for G in (2, 3, 5):
        expected = torch.tensor(0.0, dtype=torch.float64)
        for group in itertools.product((0.0, 1.0), repeat=G):
            rewards = torch.tensor([group], dtype=torch.float64)
            logprobs = torch.where(rewards[0] == 1, p.log(), (1 - p).log())  # (G,)
            advantages = script.compute_advantages(make_args(script), rewards)[0]
            (gradient,) = torch.autograd.grad((advantages * logprobs).mean(), p)
            expected += logprobs.sum().exp().item() * gradient
        series = -sum((1 - p) ** k / k for k in range(1, G))
        (gradient,) = torch.autograd.grad(series, p)
        assert expected.item() == pytest.approx(gradient.item(), abs=1e-12)


# ---- clip_cov, copg


def test_clip_cov_by_hand(load):
    """Two responses have advantages 3 and -1 (mean 1) and log-probabilities -1, -5 and -3, -3 (mean -3)."""
    logprobs = torch.tensor([[-1.0, -5.0, math.nan], [-3.0, -3.0, math.inf]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]] * 2)
    advantages = torch.tensor([[3.0], [-1.0]], dtype=torch.float64)
    script = load("clip_cov")
    # The covariances are 2 * 2 = 4, -2 * 2 = -4, 0 and 0.
    for low, high, left in (
        (1.0, 5.0, (0, 0)),
        (-5.0, -1.0, (0, 1)),
        (4.0, 9.0, None),
        (1.0, 4.0, None),
    ):
        args = make_args(script, cov_low=low, cov_high=high)
        kept = script.clip_cov(args, logprobs, advantages, mask)
        expected = advantages.expand(2, 3).clone()
        if left:
            expected[left] = 0.0
        assert torch.equal(kept, expected)
    # clip_cov must not change its input.
    assert advantages.tolist() == [[3.0], [-1.0]]


@pytest.mark.parametrize(("share", "count"), [(0.5, None), (0.1, 2), (1e-6, 1)])
def test_clip_cov_leaves_out_so_many_tokens_between_the_bounds(share, count, load):
    logprobs, _, _, advantages, mask = ragged_batch(1)
    logprobs, script = logprobs.detach(), load("clip_cov")
    total = int(mask.sum())
    values = [
        (i, t, logprobs[i, t].item(), advantages[i].item()) for i, t in mask.nonzero().tolist()
    ]
    means = [math.fsum(value[k] for value in values) / total for k in (2, 3)]
    covariances = {(i, t): (x - means[0]) * (a - means[1]) for i, t, x, a in values}
    between = {place for place, value in covariances.items() if 0.05 < value < 0.6}
    count = min(len(between), int(share * total)) if count is None else count
    assert 2 < len(between) < total and count == min(len(between), max(1, int(share * total)))
    args, seen = make_args(script, cov_low=0.05, cov_high=0.6, cov_share=share), set()
    for seed in range(60):
        torch.manual_seed(seed)
        kept = script.clip_cov(args, logprobs, advantages, mask)
        out = {(i, t) for i, t in (kept != advantages).nonzero().tolist()}
        assert len(out) == count and out <= between and all(kept[place] == 0 for place in out)
        seen |= out
    # The draws are random, so 60 seeds draw every token.
    assert seen == between


def test_copg_descends_the_regression_on_pairs(load):
    """For one group, the script's three functions give the same gradient as autograd of the paper's loss."""
    script, beta, G = load("copg"), 0.3, 6
    logprobs, old, ref, _, mask = ragged_batch(5)
    rewards = torch.rand(1, G, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    args = make_args(script, beta=beta)
    returns = script.compute_returns(args, rewards, logprobs.detach(), ref, mask)
    advantages = script.compute_advantages(args, returns).view(-1, 1)
    _, gradient = loss_and_gradient(script, args, logprobs, old, ref, advantages, mask)
    clean = logprobs.detach().masked_fill(~mask, 0.0).requires_grad_()
    R = rewards[0] - beta * torch.where(mask, clean - ref, 0.0).sum(1)  # (G,)
    pairs = [(R[i] - R[j]) ** 2 for i in range(G) for j in range(i)]
    (expected,) = torch.autograd.grad(sum(pairs) / (2 * beta * G * (G - 1)), clean)
    assert torch.allclose(gradient, expected, atol=1e-12) and gradient.abs().max() > 0.01
    # For the sampling policy, CoPG's returns equal RLOO's.
    given = (args, rewards, logprobs.detach(), ref, mask)
    assert torch.equal(returns, rloo.compute_returns(*given))


# ---- main

SMALL = dict(num_prompts=3, num_generations=4, max_new_tokens=21, eval_size=1, seed=3)
SMALL |= dict(learning_rate=1e-3, micro_batch_tokens=150, device="cpu")


def run(script, folder, name, num_steps=1, **given):
    """Run the small task. Return the metrics, the samples and each step's response lengths (B, G)."""
    rollouts, sample_responses, evaluate = [], script.sample_responses, script.evaluate

    def recorded(*call):
        rollout = sample_responses(*call)
        rollouts.append(rollout.response_mask.sum(1).view(-1, call[4]).tolist())
        return rollout

    script.sample_responses = recorded
    # All scripts share the evaluation, and it would take half of the time.
    script.evaluate = lambda *call: {"eval/accuracy": 0.0}
    try:
        given |= dict(num_steps=num_steps, runs_dir=str(folder), run_name=name)
        args = make_args(script, **small_recipe(script) | SMALL | given)
        args.dataset = str(folder / "few.jsonl")
        metrics = script.main(args)
    finally:
        script.sample_responses, script.evaluate = sample_responses, evaluate
    samples = [json.loads(line) for line in (folder / name / "samples.jsonl").open()]
    return metrics, samples, rollouts


def weights(folder, name):
    return torch.load(folder / name / "checkpoint.pt", weights_only=True)["model"]


def same_weights(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def expected_advantages(name, samples, lengths):
    """The advantages (B, G) of a step, computed from the recorded rewards with the formulas of the docstrings.

    For copg and p3o this is None, because the records don't contain their returns.
    """
    rewards = torch.tensor([sample["rewards"] for sample in samples], dtype=torch.float64)
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    if name == "gdpo":
        texts = [sample["completions"] for sample in samples]
        answers = [[sample["answer"]] * 4 for sample in samples]
        table = []
        for function in (accuracy_reward, format_reward):
            scores = map(function, texts, answers)
            table.append(torch.tensor(list(scores), dtype=torch.float64))  # (B, G)
        normal = [(x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-4) for x in table]
        return (sum(normal) - sum(normal).mean()) / (sum(normal).std() + 1e-4)
    if name == "opo":
        lengths = torch.tensor(lengths, dtype=torch.float64)
        return rewards - (lengths * rewards).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    if name == "maxrl":
        assert set(rewards.flatten().tolist()) <= {0.0, 1.0}
        return (rewards - mean) / mean.clamp(min=1e-4)
    if name == "reinforce_pp":
        return (rewards - mean) / ((rewards - mean).std() + 1e-4)
    if name in ("mdpo", "topr"):
        return rewards - mean
    return (rewards - mean) / (std + 1e-4) if name not in ("copg", "p3o") else None


@pytest.mark.parametrize("name", VARIANTS)
def test_two_steps(name, load, folder):
    script = load(name)
    metrics, samples, rollouts = run(script, folder, name, num_steps=2, num_minibatches=2)
    assert metrics["step"] == 2 and metrics["optim/skipped"] == 0 and metrics["optim/grad_norm"] > 0
    assert all(math.isfinite(x) for x in metrics.values())
    assert (folder / name / f"{name}.py").read_text() == (folder / f"{name}.py").read_text()
    for step, lengths in enumerate(rollouts, start=1):
        records = [sample for sample in samples if sample["step"] == step]
        logged = torch.tensor([sample["advantages"] for sample in records], dtype=torch.float64)
        expected = expected_advantages(name, records, lengths)
        assert expected is None or torch.allclose(logged, expected, atol=1e-4)
        assert logged.abs().max() > 0.01


@pytest.fixture(scope="module")
def plain(folder):
    """Runs of grpo.py and rloo.py with their final weights. Some variants must agree with them."""
    return {
        script: (run(script, folder, script.__name__, **given), weights(folder, script.__name__))
        for script, given in ((grpo, dict(num_minibatches=2)), (rloo, dict(num_minibatches=1)))
    }


def test_copg_with_one_update_is_rloo(load, folder, plain):
    run(load("copg"), folder, "copg-one", num_minibatches=1)
    assert same_weights(weights(folder, "copg-one"), plain[rloo][1])


def test_copg_computes_the_returns_of_the_policy_that_learns(load, folder, monkeypatch):
    """Before each update copg computes all sequences' returns with the current weights. The update uses them."""
    script, seen, used = load("copg"), [], []
    compute_returns, policy_loss = script.compute_returns, script.policy_loss
    rollout_logprobs, fresh = script.rollout_logprobs, []

    def recorded_logprobs(*call):
        fresh.append(rollout_logprobs(*call))
        return fresh[-1]

    def recorded_returns(args, rewards, logprobs, ref_logprobs, mask):
        returns = compute_returns(args, rewards, logprobs, ref_logprobs, mask)
        seen.append((returns, logprobs.clone(), ref_logprobs, mask))
        return returns

    def recorded_loss(*call, **count):
        used.append((len(seen), call[4].flatten()))
        return policy_loss(*call, **count)

    monkeypatch.setattr(script, "rollout_logprobs", recorded_logprobs)
    monkeypatch.setattr(script, "compute_returns", recorded_returns)
    monkeypatch.setattr(script, "policy_loss", recorded_loss)
    run(script, folder, "copg-two", num_minibatches=2, beta=0.5)
    (first, sampled, ref, mask), (second, moved, *_) = seen
    assert torch.equal(moved, fresh[-1]) and (moved - sampled).abs()[mask].max() > 1e-3
    shift = torch.where(mask, moved - sampled, 0.0).sum(1).view(3, 4)
    assert torch.allclose(second - first, -0.5 * shift, atol=1e-5)
    for update, advantages in used:
        all_of_them = script.compute_advantages(None, seen[update - 1][0]).flatten().tolist()
        assert set(advantages.tolist()) <= set(all_of_them)
    assert {update for update, _ in used} == {1, 2}


def test_p3o_weighs_each_pair_with_the_policy_that_learns(load, folder, monkeypatch, plain):
    """The first update has RLOO's advantages. The second one has the same returns and the new ratios."""
    script, fresh, seen, used = load("p3o"), [], [], []
    rollout_logprobs, compute_returns = script.rollout_logprobs, script.compute_returns
    compute_advantages, policy_loss = script.compute_advantages, script.policy_loss
    known = {}

    def recorded_logprobs(*call):
        fresh.append(rollout_logprobs(*call).clone())
        return fresh[-1].clone()

    def recorded_returns(args, rewards, old_logprobs, ref_logprobs, mask):
        known.update(old=old_logprobs.clone(), mask=mask)
        known["returns"] = compute_returns(args, rewards, old_logprobs, ref_logprobs, mask)
        return known["returns"].clone()

    def recorded_advantages(args, returns, logratio):
        assert torch.equal(returns, known["returns"])
        advantages = compute_advantages(args, returns, logratio)
        seen.append((logratio.clone(), advantages.clone()))
        return advantages

    def recorded_loss(*call, **count):
        used.append((len(seen) - 1, call[4].flatten()))
        return policy_loss(*call, **count)

    monkeypatch.setattr(script, "rollout_logprobs", recorded_logprobs)
    monkeypatch.setattr(script, "compute_returns", recorded_returns)
    monkeypatch.setattr(script, "compute_advantages", recorded_advantages)
    monkeypatch.setattr(script, "policy_loss", recorded_loss)
    _, samples, _ = run(script, folder, "p3o-two", num_minibatches=2, beta=0.5)
    (start, at_start), (moved, later) = seen
    assert (start == 0).all() and moved.abs().max() > 1e-3
    assert torch.allclose(at_start, rloo.compute_advantages(None, known["returns"]), atol=1e-6)
    change = torch.where(known["mask"], fresh[-1] - known["old"], 0.0).sum(1).view(3, 4)
    assert torch.equal(moved, change)
    for update, advantages in used:
        assert set(advantages.tolist()) <= set(seen[update][1].flatten().tolist())
    assert {update for update, _ in used} == {0, 1}
    assert torch.equal(torch.tensor([sample["advantages"] for sample in samples]), later)
    # With one update it is rloo.py.
    (_, expected, _), _ = plain[rloo]
    _, samples, _ = run(script, folder, "p3o-one", num_minibatches=1)
    for sample, other in zip(samples, expected, strict=True):
        assert sample["completions"] == other["completions"]
        assert sample["advantages"] == pytest.approx(other["advantages"], abs=1e-6)


def test_clip_cov_of_no_token_is_grpo_and_of_all_learns_nothing(load, folder, plain):
    script = load("clip_cov")
    run(script, folder, "clip_cov-none", num_minibatches=2, cov_low=1e6, cov_high=2e6)
    assert same_weights(weights(folder, "clip_cov-none"), plain[grpo][1])
    everything = dict(cov_low=-1e6, cov_high=1e6, cov_share=1.0, beta=0.0)
    run(script, folder, "clip_cov-all", num_minibatches=2, **everything)
    given = torch.load(folder / "clip_cov-all" / "checkpoint.pt", weights_only=True)
    assert given["metrics"]["optim/grad_norm"] == 0
    assert not same_weights(given["model"], plain[grpo][1])


def test_clip_cov_measures_over_the_minibatch_by_the_weights_of_that_moment(
    load, folder, monkeypatch
):
    """The loss gets the advantages from clip_cov, each in the row of its sequence."""
    script, calls, clip_cov = load("clip_cov"), [], load("clip_cov").clip_cov
    minibatches, drawn = script.minibatches, []
    micro_batches, policy_loss, rows_seen, used = script.micro_batches, script.policy_loss, [], []

    def recorded_minibatches(*call):
        for minibatch in minibatches(*call):
            drawn.append(minibatch.tolist())
            yield minibatch

    def recorded(args, logprobs, advantages, mask):
        kept = clip_cov(args, logprobs, advantages, mask)
        calls.append((logprobs.clone(), advantages, mask, kept))
        return kept

    def recorded_micro_batches(*call):
        for rows in micro_batches(*call):
            rows_seen.append(rows)
            yield rows

    def recorded_loss(*call, **count):
        used.append((len(calls) - 1, rows_seen[-1], call[4]))
        return policy_loss(*call, **count)

    monkeypatch.setattr(script, "minibatches", recorded_minibatches)
    monkeypatch.setattr(script, "clip_cov", recorded)
    monkeypatch.setattr(script, "micro_batches", recorded_micro_batches)
    monkeypatch.setattr(script, "policy_loss", recorded_loss)
    given = dict(num_iterations=2, num_minibatches=2, cov_low=0.0, cov_high=9.0, cov_share=0.1)
    _, samples, rollouts = run(script, folder, "clip_cov-seen", **given)
    lengths = [length for group in rollouts[0] for length in group]
    expected = [advantage for sample in samples for advantage in sample["advantages"]]
    for minibatch, (_, advantages, mask, kept) in zip(drawn, calls, strict=True):
        assert mask.sum(1).tolist() == [lengths[i] for i in minibatch]
        assert advantages.shape == (6, 1)
        assert advantages.flatten().tolist() == [expected[i] for i in minibatch]
        assert (kept != advantages).any() and (kept == advantages).any()
    for update, rows, advantages in used:
        places = [drawn[update].index(i) for i in rows]
        assert torch.equal(advantages, calls[update][3][places])
    assert {update for update, _, _ in used} == {0, 1, 2, 3}
    # The second pass repeats a sequence of the first minibatch. The policy changed between the two passes.
    sequence = drawn[0][0]
    again = 2 if sequence in drawn[2] else 3
    first, second = calls[0][0][0], calls[again][0][drawn[again].index(sequence)]
    assert not torch.equal(first, second)


# ---- variants/README.md


def test_the_page_lists_every_patch_with_its_lines():
    text = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.diff\) \|(.*)\|$", text, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == VARIANTS
    for name, target, rest in rows:
        cells = [cell.strip() for cell in rest.split("|")]
        docstring, code = changed(name)
        assert (
            target == name and cells[1] == parent_of(name) and cells[2] == f"{code} + {docstring}"
        )


def test_the_page_places_every_patch_and_knows_every_name():
    text = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
    firsts = re.findall(r"^\| ([a-z0-9_, ]+) \|", text.split("## Three choices")[1], re.MULTILINE)
    names = [name for first in firsts for name in first.split(", ")]
    assert len(names) == len(set(names))
    assert set(VARIANTS) <= set(names) <= {*SCRIPTS, *VARIANTS}
