"""variants/: each patch applies to today's parent without fuzz, and the patched script is right.

The tests check the formulas like test_equations.py: with numbers worked by hand, identities, and slow float64 loops
whose gradients are worked out on paper. If TRL is installed, they also compare losses with TRL's. Each variant runs two
steps of main.
"""

import importlib.util
import inspect
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
import tyro
from conftest import ROOT, SCRIPTS, small_recipe
from test_equations import loss_of, make_args, ragged_batch
from transformers import AutoModelForCausalLM

import dr_grpo
import grpo
import grpo_offpolicy
import grpo_tools
import rloo
from utils.rewards import accuracy_reward, format_reward

# Two patches have a parent without rewards: tests/test_distill.py and tests/test_self_distill.py are about them.
PATCHES = sorted(path.stem for path in (ROOT / "variants").glob("*.diff"))
VARIANTS = [name for name in PATCHES if name not in ("full_vocabulary", "sdpo_context")]
# The variants that change policy_loss. The others change the advantages.
LOSSES = ["cispo", "dppo", "gmpo", "luspo", "mdpo", "sapo", "topr", "unbiased_kl", "vespo"]


def parent_of(name):
    first = (ROOT / "variants" / f"{name}.diff").read_text(encoding="utf-8").split("\n", 1)[0]
    return re.fullmatch(r"--- (\w+)\.py", first).group(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for the patched scripts, with two bundled models and 60 problems. They use the repository's utils/."""
    folder = tmp_path_factory.mktemp("variants")
    for name in ("adder", "caller"):
        shutil.copytree(ROOT / "assets" / name, folder / "assets" / name)
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


# ---- the patches


@pytest.mark.parametrize("name", VARIANTS)
def test_it_applies_and_says_what_it_is(name, load):
    """The patch applies without fuzz (load checks this), names its paper and parent, and has no long lines."""
    source = Path(load(name).__file__).read_text(encoding="utf-8")
    docstring = source[: source.index('"""\n\nimport')]
    assert "arXiv:" in docstring[:250] and f"Parent: {parent_of(name)}.py" in docstring
    assert "Departures from the paper" in docstring and f"    python {name}.py  " in docstring
    assert max(map(len, source.splitlines())) <= 100
    # Comments must stand above their code, not behind a bracket.
    assert not re.search(r"^\s*\)  #", source, re.MULTILINE)


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
    change_parent(
        tmp_path, "accuracy_reward, format_reward, has", "format_reward, accuracy_reward, has"
    )
    assert not applied(tmp_path, "cispo")
    make.main([])
    after = before.replace(
        "accuracy_reward, format_reward, has", "format_reward, accuracy_reward, has"
    )
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


# ---- geo_mask, icepop, opsm, kimi_kl: a stale or foreign sampler


def far_batch(seed):
    """A ragged batch of which each mask leaves out some: (current, sampled, advantages, mask)."""
    current, sampled, _, advantages, mask = ragged_batch(seed)
    # Half of the distance, so that the mean log-ratios are on both sides of the bounds.
    return current.detach(), (current.detach() + sampled) / 2, advantages, mask


def ratios_of(current, sampled, mask):
    """The ratios current / sampled of each sequence's tokens."""
    return [
        [math.exp(current[i, t].item() - sampled[i, t].item()) for t in range(int(mask[i].sum()))]
        for i in range(len(mask))
    ]


def test_geo_mask_by_hand(load):
    """The geometric means are sqrt(1.2 * 0.9) = 1.0392, sqrt(4 / 4) = 1, 0.8, and 1.21."""
    ratios = torch.tensor([[1.2, 0.9, 1.0], [4.0, 0.25, 1.0], [0.8, 9.0, 1.0], [1.21] * 3]).double()
    old = ratios.log().requires_grad_()
    mask = torch.tensor(
        [[True, True, False], [True, True, False], [True, False, False], [True] * 3]
    )
    old = old.masked_fill(~mask, math.nan)
    script, sampled = load("geo_mask"), torch.zeros(4, 3, dtype=torch.float64)
    first, second = [1.2, 0.9, 1.0], [2.0, 0.25, 1.0]
    for low, high, expected in (
        (0.9, 1.04, [first, second, [0.0] * 3, [0.0] * 3]),
        (0.9, 1.03, [[0.0] * 3, second, [0.0] * 3, [0.0] * 3]),
        (0.79, 1.22, [first, second, [0.8, 1.0, 1.0], [1.21] * 3]),
    ):
        args = make_args(script, geo_low=low, geo_high=high)
        weights = script.compute_sampler_weights(args, old, sampled, mask)
        assert torch.allclose(weights, torch.tensor(expected).double(), atol=1e-12)
        assert not weights.requires_grad
        args.rollout_correction = 0.0
        weights = script.compute_sampler_weights(args, old, sampled, mask)
        assert torch.equal(weights, (torch.tensor(expected) != 0).double())
    # Equal policies are kept by any bounds.
    args = make_args(script, geo_low=1.0, geo_high=1.0)
    assert (script.compute_sampler_weights(args, sampled, sampled, mask) == 1).all()


def test_icepop_by_hand(load):
    script = load("icepop")
    old = torch.tensor([[0.4999, 0.5001, 1.5, 4.999, 5.001, 1.0]], dtype=torch.float64).log()
    old = old.requires_grad_()
    sampled = torch.zeros(1, 6, dtype=torch.float64)
    mask = torch.tensor([[True] * 5 + [False]])
    sampled[0, 5] = math.nan
    weights = script.compute_sampler_weights(make_args(script), old, sampled, mask)
    assert weights.tolist()[0] == pytest.approx([0.0, 0.5001, 1.5, 4.999, 0.0, 1.0])
    assert not weights.requires_grad
    args = make_args(script, icepop_low=0.0, icepop_high=2.0)
    weights = script.compute_sampler_weights(args, old, sampled, mask)
    assert weights.tolist()[0] == pytest.approx([0.4999, 0.5001, 1.5, 0.0, 0.0, 1.0])
    # The parent's cap on the product of a sequence, here 0.4999 * 0.5001 * ... * 5.001 = 9.375, still works.
    args = make_args(script, sequence_cap=9.3)
    assert (script.compute_sampler_weights(args, old, sampled, mask) == 0).all()


def test_masks_against_a_slow_loop(load):
    geo, icepop, opsm = load("geo_mask"), load("icepop"), load("opsm")
    seen = {"geo": set(), "icepop": set(), "opsm": set()}
    for seed in range(4):
        current, sampled, advantages, mask = far_batch(seed)
        given = (current, sampled, mask)
        args = make_args(geo, geo_low=0.8, geo_high=1.3, rollout_correction=1.5)
        by_geo = geo.compute_sampler_weights(args, *given)
        args = make_args(icepop, icepop_low=0.8, icepop_high=1.3)
        by_icepop = icepop.compute_sampler_weights(args, *given)
        args = make_args(opsm, opsm_delta=0.05)
        kept = opsm.off_policy_mask(args, current, sampled, advantages, mask)
        assert kept.shape == (6, 1) and kept.dtype == torch.bool
        for i, ratios in enumerate(ratios_of(*given)):
            mean = math.prod(ratios) ** (1 / len(ratios))
            distance = -math.fsum(map(math.log, ratios)) / len(ratios)
            is_bad = advantages[i].item() < 0
            assert kept[i].item() == (not is_bad or distance <= 0.05)
            seen["geo"].add(0.8 <= mean <= 1.3)
            seen["opsm"].add((is_bad, distance <= 0.05))
            for t, ratio in enumerate(ratios):
                expected = min(ratio, 1.5) if 0.8 <= mean <= 1.3 else 0.0
                assert by_geo[i, t].item() == pytest.approx(expected, abs=1e-12)
                expected = ratio if 0.8 <= ratio <= 1.3 else 0.0
                assert by_icepop[i, t].item() == pytest.approx(expected, abs=1e-12)
                seen["icepop"].add(expected > 0)
    assert seen["geo"] == seen["icepop"] == {True, False}
    assert len(seen["opsm"]) == 4


def test_masks_without_bounds_are_grpo_offpolicy_without_limits(load):
    """Without bounds the weights are the parent's. With one token per response, geo_mask is icepop."""
    current, sampled, advantages, mask = far_batch(1)
    wide = 2.0**32
    geo, icepop, opsm = load("geo_mask"), load("icepop"), load("opsm")
    args = make_args(grpo_offpolicy, rollout_correction=wide)
    expected = grpo_offpolicy.compute_sampler_weights(args, current, sampled, mask)
    args = make_args(icepop, icepop_low=0.0, icepop_high=wide)
    assert torch.equal(icepop.compute_sampler_weights(args, current, sampled, mask), expected)
    for correction in (0.0, 1.2, wide):
        args = make_args(grpo_offpolicy, rollout_correction=correction)
        expected = grpo_offpolicy.compute_sampler_weights(args, current, sampled, mask)
        args = make_args(geo, geo_low=0.0, geo_high=wide, rollout_correction=correction)
        assert torch.equal(geo.compute_sampler_weights(args, current, sampled, mask), expected)
    args = make_args(opsm, opsm_delta=wide)
    assert opsm.off_policy_mask(args, current, sampled, advantages, mask).all()
    one = (current.T[:1].T, sampled.T[:1].T, mask.T[:1].T)  # (6, 1) each
    args = make_args(geo, geo_low=0.8, geo_high=1.3, rollout_correction=wide)
    by_geo = geo.compute_sampler_weights(args, *one)
    args = make_args(icepop, icepop_low=0.8, icepop_high=1.3)
    assert torch.equal(by_geo, icepop.compute_sampler_weights(args, *one))
    assert 0 < (by_geo == 0).sum() < 6


def test_opsm_by_hand(load):
    """The mean log-ratios of the sampler and the policy are (0.3 - 0.1) / 2 = 0.1, 0.3 and -0.5."""
    sampled = torch.tensor([[-1.0, -1.0, 7.0], [-1.0, 8.0, 9.0], [-1.0, -1.0, -1.0]]).double()
    logprobs = torch.tensor([[-1.3, -0.9, math.nan], [-1.3, math.inf, 0.0], [-0.5] * 3]).double()
    mask = torch.tensor([[True, True, False], [True, False, False], [True] * 3])
    script = load("opsm")
    for delta, advantage, expected in (
        (0.05, -1.0, [False, False, True]),
        (0.2, -1.0, [True, False, True]),
        (0.4, -1.0, [True, True, True]),
        # Only bad responses are left out. An advantage of 0 isn't bad.
        (0.05, 1.0, [True] * 3),
        (0.05, 0.0, [True] * 3),
    ):
        args = make_args(script, opsm_delta=delta)
        advantages = torch.full((3, 1), advantage).double()
        kept = script.off_policy_mask(args, logprobs, sampled, advantages, mask)
        assert kept.flatten().tolist() == expected
    for bad in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(3, 3)):
        with pytest.raises(AssertionError):
            script.off_policy_mask(args, logprobs, sampled, bad, mask)


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.5])
def test_opsm_against_trl(delta, load, trl):
    """TRL multiplies by its mask, so masked slots must not contain garbage."""
    script = load("opsm")
    for seed in range(4):
        logprobs, sampled, advantages, mask = far_batch(seed)
        logprobs, sampled = (x.masked_fill(~mask, -1.0) for x in (logprobs, sampled))
        theirs = trl["grpo"].get_off_policy_mask(advantages, logprobs, sampled, mask, delta)
        args = make_args(script, opsm_delta=delta)
        mine = script.off_policy_mask(args, logprobs, sampled, advantages, mask)
        assert torch.equal(mine, theirs.bool())


def kimi_loss(script, args, logprobs, old, sampled, ref, advantages, mask):
    """The loss of a whole minibatch, its gradient (n, R) and the stats."""
    logprobs = logprobs.detach().clone().requires_grad_()
    advantages = advantages.expand_as(mask)
    given = (logprobs, old, sampled, ref, advantages, mask)
    loss, stats = script.policy_loss(args, *given, num_seqs=len(mask))
    loss.backward()
    return loss.item(), logprobs.grad, stats


def test_kimi_kl_by_hand(load):
    """The log-ratios to the sampler are 0.5 and -0.2. The advantage is 0, so only the penalty is left."""
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64)
    sampled = torch.tensor([[-1.5, -1.8, math.inf]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    script, zero = load("kimi_kl"), torch.zeros(1, 1, dtype=torch.float64)
    given = (logprobs, logprobs, sampled, None, zero, mask)
    loss, slope, stats = kimi_loss(script, make_args(script, kl_tau=0.1), *given)
    assert loss == pytest.approx(0.1 * (0.25 + 0.04) / 2, abs=1e-12)
    assert slope.tolist()[0] == pytest.approx([0.1 * 0.5, -0.1 * 0.2, 0.0], abs=1e-12)
    assert stats["kl/sampler"].item() == pytest.approx((0.25 + 0.04) / 2)
    for bad in (torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(3)):
        with pytest.raises(AssertionError):
            kimi_loss(script, make_args(script), logprobs, logprobs, bad, None, zero, mask)


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_kimi_kl_adds_its_gradient_to_the_parents(beta, load):
    """A slow loop adds 2 tau l / |o| / n to the gradient. With tau 0, and at the sampler, it adds nothing."""
    script = load("kimi_kl")
    logprobs, old, ref, advantages, mask = ragged_batch(2)
    _, sampled, _, _ = far_batch(3)
    sampled = torch.where(mask, sampled.nan_to_num(-1.0, -1.0, -1.0).clamp(-2, 0), math.nan)
    args = make_args(grpo_offpolicy, beta=beta)
    plain = loss_and_gradient(grpo_offpolicy, args, logprobs, old, ref, advantages, mask)
    args = make_args(script, beta=beta, kl_tau=0.0)
    none = kimi_loss(script, args, logprobs, old, sampled, ref, advantages, mask)
    assert none[0] == plain[0] and torch.equal(none[1], plain[1])
    args = make_args(script, beta=beta, kl_tau=0.3)
    loss, slope, _ = kimi_loss(script, args, logprobs, old, sampled, ref, advantages, mask)
    expected, total = plain[1].clone(), plain[0]
    for i, t in mask.nonzero().tolist():
        distance = logprobs[i, t].item() - sampled[i, t].item()
        expected[i, t] += 0.3 * 2 * distance / int(mask[i].sum()) / 6
        total += 0.3 * distance**2 / int(mask[i].sum()) / 6
    assert loss == pytest.approx(total, abs=1e-12)
    assert torch.allclose(slope, expected, atol=1e-12) and (slope - plain[1]).abs().max() > 0.01
    same = kimi_loss(script, args, logprobs, old, logprobs.detach(), ref, advantages, mask)
    assert same[0] == plain[0] and torch.equal(same[1], plain[1])


# ---- echo


def test_echo_by_hand(load):
    """The tool wrote two tokens of the first response, none of the second, and one of the third."""
    logprobs = torch.tensor([[-1.0, -0.5, math.nan], [math.inf, -1.0, -1.0], [-3.0, -9.0, -9.0]])
    logprobs = logprobs.double().requires_grad_()
    tool_mask = torch.tensor([[True, True, False], [False] * 3, [True, False, False]])
    script = load("echo")
    loss = script.tool_loss(make_args(script, echo_coef=0.4), logprobs, tool_mask, num_seqs=5)
    assert loss.item() == pytest.approx(0.4 * (0.75 + 0.0 + 3.0) / 5, abs=1e-12)
    (slope,) = torch.autograd.grad(loss, logprobs)
    expected = [[-0.4 / 2 / 5, -0.4 / 2 / 5, 0.0], [0.0] * 3, [-0.4 / 5, 0.0, 0.0]]
    assert torch.allclose(slope, torch.tensor(expected).double(), atol=1e-12)
    assert script.tool_loss(make_args(script, echo_coef=0.0), logprobs, tool_mask, 5) == 0


@pytest.mark.parametrize("seed", range(3))
def test_echo_against_a_slow_loop_and_cross_entropy(seed, load):
    """The gradient of the logits is lambda (softmax - one-hot) / |e| / N at each token of the tool, and 0 elsewhere."""
    script = load("echo")
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 5, (4, 6), generator=generator)
    tool_mask = torch.rand(4, 6, generator=generator) < 0.4
    tool_mask[3] = False
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    args, total = make_args(script, echo_coef=0.3), 0.0
    loss = script.tool_loss(args, logprobs, tool_mask, num_seqs=4)
    expected = torch.zeros_like(logits)
    for i, t in tool_mask.nonzero().tolist():
        share = 0.3 / int(tool_mask[i].sum()) / 4
        row = logits[i, t].detach().exp()
        row = row / row.sum()
        total -= share * math.log(row[targets[i, t]].item())
        expected[i, t] = share * row
        expected[i, t, targets[i, t]] -= share
    assert loss.item() == pytest.approx(total, abs=1e-12) and total > 0
    (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.allclose(slope, expected, atol=1e-12)
    # The terms of micro-batches add up.
    parts = [
        script.tool_loss(args, logprobs[rows], tool_mask[rows], 4) for rows in ([0], [1, 2, 3])
    ]
    assert sum(parts).item() == pytest.approx(total, abs=1e-12)


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


# ---- main: geo_mask, icepop, kimi_kl, opsm, echo


@pytest.mark.parametrize("name", ["geo_mask", "icepop", "kimi_kl", "opsm"])
def test_with_the_sampler_of_the_trainer_it_is_grpo_offpolicy(name, load, folder):
    """With fresh weights nothing is left out. kimi_kl also needs tau 0, since rounding leaves a small distance."""
    given = dict(num_steps=2, num_minibatches=1, staleness=1)
    if not (folder / "fresh").exists():
        run(grpo_offpolicy, folder, "fresh", **given)
    given |= dict(kl_tau=0.0) if name == "kimi_kl" else {}
    metrics, _, _ = run(load(name), folder, f"{name}-fresh", **given)
    assert same_weights(weights(folder, f"{name}-fresh"), weights(folder, "fresh"))
    shares = [x for key, x in metrics.items() if key.endswith("masked_frac")]
    assert shares == ([] if name == "kimi_kl" else [0.0])


# In three steps the policy gets so far from the sampler that each mask leaves out some, and keeps others.
BOUNDS = dict(geo_low=0.98, geo_high=1.02, icepop_low=0.8, icepop_high=1.3, opsm_delta=0.01)


def record(script, monkeypatch, name, calls):
    """Append each call of this function to the list: its arguments and its result."""
    function = getattr(script, name)

    def recorded(*call, **given):
        result = function(*call, **given)
        calls.append((call, result))
        return result

    monkeypatch.setattr(script, name, recorded)


@pytest.mark.parametrize("name", ["opsm", "kimi_kl"])
def test_each_update_compares_the_current_policy_with_the_sampler(name, load, folder, monkeypatch):
    """The arguments are those of the micro-batch: log-probabilities of the moment, and the recorded ones."""
    script, masks, losses, rollouts, policies = load(name), [], [], [], []
    record(script, monkeypatch, "policy_loss", losses)
    record(script, monkeypatch, "sample_responses", rollouts)
    record(script, monkeypatch, "compute_logprobs", policies)
    if name == "opsm":
        record(script, monkeypatch, "off_policy_mask", masks)
    given = dict(num_steps=3, num_iterations=2, num_minibatches=2, staleness=16)
    run(script, folder, f"{name}-seen", **given, opsm_delta=0.01)
    # compute_logprobs also computes the old and the reference log-probabilities, without a gradient.
    current = [(call[1], logprobs) for call, logprobs in policies if logprobs.requires_grad]
    assert len(current) == len(losses) > 12
    num_left_out = 0
    for update, ((part, logprobs), (loss_call, _)) in enumerate(zip(current, losses, strict=True)):
        assert loss_call[1] is logprobs
        if name == "kimi_kl":
            assert torch.equal(loss_call[3], part.sampled_logprobs)
            continue
        mask_call, kept = masks[update]
        assert mask_call[1] is logprobs and torch.equal(mask_call[2], part.sampled_logprobs)
        assert torch.equal(mask_call[4], part.response_mask)
        # The advantages of a response that is left out are 0, and the others keep their sign.
        expected = mask_call[3].sign() * kept  # (n, 1)
        assert torch.equal(loss_call[4].sign(), expected.expand_as(part.response_mask))
        num_left_out += int((~kept).sum())
    assert name == "kimi_kl" or num_left_out > 0


@pytest.mark.parametrize("name", ["geo_mask", "icepop", "opsm"])
def test_the_logged_share_of_a_mask(name, load, folder, monkeypatch):
    """A slow loop over the log-probabilities of the last step gives the logged share."""
    script, losses, policies = load(name), [], []
    record(script, monkeypatch, "policy_loss", losses)
    record(script, monkeypatch, "compute_logprobs", policies)
    # Each step has one update with one micro-batch.
    given = dict(num_steps=3, num_minibatches=1, micro_batch_tokens=10**6, staleness=16)
    metrics, _, _ = run(script, folder, f"{name}-share", **given | BOUNDS)
    part = [call[1] for call, logprobs in policies if logprobs.requires_grad][-1]
    (_, logprobs, old, _, advantages, mask), _ = losses[-1]
    assert torch.equal(mask, part.response_mask)
    left_out, total = 0, 0
    for i, ratios in enumerate(ratios_of(old, part.sampled_logprobs, mask)):
        mean = math.prod(ratios) ** (1 / len(ratios))
        if name == "geo_mask":
            left_out, total = left_out + (not 0.98 <= mean <= 1.02), total + 1
        elif name == "icepop":
            left_out += sum(not 0.8 <= ratio <= 1.3 for ratio in ratios)
            total += len(ratios)
        else:
            # The advantages of a response that is left out are 0 already.
            far = mean < math.exp(-0.01)
            left_out += len(ratios) * (far and (advantages[i] == 0).all().item())
            assert not far or advantages[i].min() >= 0
            total += len(ratios)
    assert len(mask) == 12 and 0 < left_out < total
    prefix = "policy" if name == "opsm" else "rollout"
    assert metrics[f"{prefix}/masked_frac"] == pytest.approx(left_out / total)


def test_echo_without_its_term_is_grpo_tools(load, folder):
    """compute_logprobs computes more tokens, which may round differently. Otherwise nothing changes."""
    given = dict(num_steps=2, num_minibatches=2)
    run(load("echo"), folder, "echo-none", echo_coef=0.0, **given)
    run(grpo_tools, folder, "tools", **given, model=str(ROOT / "assets" / "caller"))
    one, other = weights(folder, "echo-none"), weights(folder, "tools")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)


def test_echo_adds_the_cross_entropy_of_a_plain_forward_pass(load, folder, monkeypatch):
    """At the old policy GRPO's loss is minus the mean advantage, 0. What is left of the loss is ECHO's term."""
    script, rollouts = load("echo"), []
    record(script, monkeypatch, "sample_responses", rollouts)
    given = dict(num_prompts=8, num_minibatches=1, temperature=1.0, echo_coef=0.7, beta=0.0)
    metrics, _, _ = run(script, folder, "echo-plain", **given)
    rollout = rollouts[0][1]
    model = AutoModelForCausalLM.from_pretrained(ROOT / "assets" / "caller")
    terms, logprobs_of_tool = [], []
    for i in range(32):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]]
        is_token = rollout.context_mask[i]
        response, by_policy = rollout.response_ids[i][is_token], rollout.response_mask[i][is_token]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.double().log_softmax(-1).gather(-1, response[:, None])[:, 0]
        of_tool = logprobs[~by_policy].tolist()
        logprobs_of_tool += of_tool
        terms.append(-math.fsum(of_tool) / len(of_tool) if of_tool else 0.0)
    assert 0 < sum(term == 0.0 for term in terms) < 32
    assert metrics["policy/loss"] == pytest.approx(0.7 * sum(terms) / 32, abs=1e-5)
    expected = -math.fsum(logprobs_of_tool) / len(logprobs_of_tool)
    assert metrics["tool/cross_entropy"] == pytest.approx(expected, abs=1e-5)


# ---- variants/README.md


def test_the_page_lists_every_patch_with_its_parent():
    text = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.diff\) \|[^|]*\| (\w+) \|", text, re.MULTILINE)
    assert sorted(rows) == [(name, name, parent_of(name)) for name in PATCHES]


def test_the_page_places_every_script():
    text = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
    firsts = re.findall(r"^\| ([a-z0-9_, ]+) \|", text.split("## Three choices")[1], re.MULTILINE)
    names = [name for first in firsts for name in first.split(", ")]
    assert sorted(names) == sorted(SCRIPTS)


def test_the_commands_of_scalerl(load, folder, tmp_path, monkeypatch):
    """They make a script with cispo's loss and reinforce_pp's advantages. It trains for two steps."""
    text = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
    section = text.split("## ScaleRL's recipe\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    *patches, command = block.splitlines()
    assert command.startswith("python scalerl.py ")
    shutil.copy(ROOT / "grpo.py", tmp_path / "grpo.py")
    (tmp_path / "variants").symlink_to(ROOT / "variants")
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    outputs = []
    for line in patches:
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        outputs.append((done.returncode, done.stdout))
    assert outputs[0][0] == 0 and outputs[1][0] == 1
    assert "2 out of 3 hunks FAILED" in outputs[1][1] and "2 out of 3 hunks FAILED" in text
    source = (tmp_path / "scalerl.py").read_text(encoding="utf-8")
    rejected = (tmp_path / "scalerl.py.rej").read_text(encoding="utf-8")
    last_line = source[: source.index('"""\n\nimport')].count("\n")
    starts = [int(x) for x in re.findall(r"^@@ -(\d+)", rejected, re.MULTILINE)]
    assert len(starts) == 2 and max(starts) < last_line
    spec = importlib.util.spec_from_file_location("scalerl", tmp_path / "scalerl.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scalerl", script)
    spec.loader.exec_module(script)
    for function, name in (("policy_loss", "cispo"), ("compute_advantages", "reinforce_pp")):
        theirs = getattr(load(name), function)
        assert inspect.getsource(getattr(script, function)) == inspect.getsource(theirs)
    args = tyro.cli(script.Args, args=command.split()[2:])
    assert args.num_minibatches == 8 and args.clip_eps_high == 4.0 and args.beta == 0.0
    given = dict(num_minibatches=args.num_minibatches, num_steps=2)
    metrics, samples, _ = run(script, folder, "scalerl", **given)
    assert metrics["optim/grad_norm"] > 0 and metrics["policy/clip_frac"] >= 0
    for step in (1, 2):
        records = [sample for sample in samples if sample["step"] == step]
        logged = torch.tensor([sample["advantages"] for sample in records], dtype=torch.float64)
        expected = expected_advantages("reinforce_pp", records, None)
        assert torch.allclose(logged, expected, atol=1e-4)
