"""The scripts are siblings: what they share is the same text, and what differs is listed here, with its reason."""

import ast
import difflib
import io
import re
import tokenize

import pytest
from conftest import ROOT

KL_IN_LOSS = "the KL is k3 in the loss of the child and k1 in the return of the parent"
ALGORITHM = "the algorithm's own equation"

SIZES = {  # tokens of a file at most, comments, docstrings and newlines aside
    "reinforce_baseline": 6763,
    "rloo": 6681,
    "grpo": 6682,
    "dr_grpo": 6669,
    "dapo": 6940,
    "ppo_rlhf": 8283,
    "gspo": 6773,
    "remax": 6761,
    "grpo_offpolicy": 6989,
    "grpo_process": 7309,
    "grpo_multigpu": 7530,
    "grpo_lora": 7127,
    "distill": 6870,
    "vapo": 8167,
    "grpo_tools": 7477,
}

# child, parent -> budget of changed lines (docstring of the file aside), then what differs and why. Names are functions
# and classes of the file, Args.<field>, and upper-case constants; "header" is the import lines.
PAIRS = {
    ("rloo", "reinforce_baseline"): (
        30,
        {
            "DECAY": "no moving average",
            "LOWEST": "at least two samples",
            "Args.baseline": "the baseline is the other samples' mean, there is nothing to choose",
            "Args.num_prompts": "16 x 8 sequences instead of 128 x 1",
            "Args.num_generations": "the other samples of the prompt are the baseline",
            "compute_baseline": "no baseline to keep",
            "compute_advantages": ALGORITHM,
            "main": "no baseline to compute and keep; groups of a prompt",
        },
    ),
    ("grpo", "rloo"): (
        48,
        {
            "header": "masked_mean averages within each sequence",
            "CLIP_FRAC_EPS": "the clip range is a field here",
            "HIGHEST": "the clip range",
            "Args.num_iterations": "the clipped ratio allows several passes over a rollout",
            "Args.num_minibatches": "updates per pass, not per rollout",
            "Args.clip_eps": "the ratio is clipped",
            "Args.beta": KL_IN_LOSS,
            "compute_returns": KL_IN_LOSS,
            "compute_advantages": ALGORITHM,
            "minibatches": "several passes over a rollout",
            "policy_loss": ALGORITHM,
            "main": "updates are those of all passes; " + KL_IN_LOSS,
        },
    ),
    ("dr_grpo", "grpo"): (
        12,
        {
            "header": "masked_mean, the average within a sequence, is what the child removes",
            "RECIPES": "no KL by default",
            "compute_advantages": "not divided by the std",
            "policy_loss": "token sums divided by a constant",
        },
    ),
    ("dapo", "grpo"): (
        95,
        {
            "header": "the average is over all tokens, masked_mean is not used",
            "RECIPES": "an overlong cache instead of a KL; fewer steps, each of several rounds of sampling",
            "LOWEST": "dynamic sampling, and no KL term",
            "HIGHEST": "two bounds of the ratio",
            "Args.clip_eps": "two bounds instead of one",
            "Args.clip_eps_low": "Clip-Higher",
            "Args.clip_eps_high": "Clip-Higher",
            "Args.beta": "no KL term",
            "Args.max_resample": "dynamic sampling",
            "Args.overlong_cache": "soft overlong punishment",
            "Args.overlong_filter": "overlong filtering",
            "mixed_groups": "dynamic sampling",
            "overlong_penalty": "soft overlong punishment",
            "compute_advantages": "the heading of the section stands before another function",
            "policy_loss": ALGORITHM,
            "batches": "groups that are sampled again need more prompts",
            "main": "dynamic sampling, the penalty, the filter, and no reference model",
            "merge": "several rounds of sampling are one rollout",
            "resolve": "a warning of a cache that punishes every response",
        },
    ),
    ("ppo_rlhf", "grpo"): (
        250,
        {
            "header": "math for the KL controller",
            "LOWEST": "more fields that may be 0",
            "HIGHEST": "more fields than one have an upper bound",
            "RECIPES": "the reward model and the value network's learning rate",
            "Args.num_prompts": "128 x 1 sequences instead of 16 x 8",
            "Args.num_generations": "the value network is the baseline, one sample is enough",
            "Args.num_iterations": "PPO epochs",
            "Args.value_learning_rate": "the value network",
            "Args.reward_model": "a learned reward",
            "Args.missing_eos_penalty": "a score is valid at the end of a response only",
            "Args.normalize_scores": "the scale of a learned score is arbitrary",
            "Args.whiten_rewards": "implementation detail of PPO for RLHF",
            "Args.clip_eps": "the docstring names another equation",
            "Args.beta": "the KL is in the rewards",
            "Args.kl_target": "adaptive KL",
            "Args.kl_horizon": "adaptive KL",
            "Args.gamma": "GAE",
            "Args.gae_lambda": "GAE",
            "Args.vf_coef": "the value loss",
            "Args.value_clip_eps": "the value loss",
            "Args.value_init": "the value network",
            "whiten": ALGORITHM,
            "kl_rewards": ALGORITHM,
            "adapt_beta": "adaptive KL",
            "compute_gae": ALGORITHM,
            "value_loss": ALGORITHM,
            "compute_advantages": "GAE takes its place",
            "policy_loss": ALGORITHM,
            "main": "four networks",
            "compute_values": "the value network and the reward model",
            "rollout_values": "the value network and the reward model",
            "load_data": "with a reward model no gold number is needed",
            "resolve": "an adaptive KL needs a KL",
            "load_classifier": "the value network and the reward model",
            "load_classifiers": "the value network and the reward model",
        },
    ),
    ("gspo", "grpo"): (
        29,
        {
            "RECIPES": "no KL by default",
            "HIGHEST": "two bounds of the ratio",
            "Args.num_minibatches": "with one update per rollout the ratio is 1 and nothing is ever clipped",
            "Args.clip_eps": "two bounds instead of one",
            "Args.clip_eps_low": "the range of a sequence's ratio",
            "Args.clip_eps_high": "the range of a sequence's ratio",
            "policy_loss": ALGORITHM,
            "main": "clip_frac is a share of sequences",
        },
    ),
    ("remax", "reinforce_baseline"): (
        39,
        {
            "DECAY": "no moving average",
            "Args.baseline": "the baseline is the greedy response's reward, there is nothing to choose",
            "compute_baseline": "no baseline to keep",
            "compute_advantages": ALGORITHM,
            "generate": "the greedy responses are sampled in the same batch",
            "main": "the greedy responses are scored, counted and left out of the update",
        },
    ),
    ("grpo_offpolicy", "grpo"): (
        47,
        {
            "LOWEST": "the bounds of the correction and of dual clip",
            "Args.staleness": "a sampler that is behind",
            "Args.sampler_dtype": "a sampler that is rounded",
            "Args.rollout_correction": "truncated importance sampling",
            "Args.sequence_cap": "leaving out sequences that are far from the sampler",
            "Args.dual_clip": "dual clip",
            "rollout_correction": "truncated importance sampling",
            "policy_loss": "dual clip",
            "inference_copy": "the engine is rounded where the flag says so, not where the device does",
            "main": "an engine samples, a copy that is refreshed now and then, and the correction for it",
        },
    ),
    ("grpo_multigpu", "grpo"): (
        110,
        {
            "header": "torch's distributed engine",
            "WHOLE": "a checkpoint that does not depend on the number of processes",
            "main": "sharding; means over the processes; rank 0 alone asks and writes; all stop together",
            "rollout_logprobs": "each process computes its share",
            "micro_batches": "each process takes its share, all of them equally many",
            "everywhere": "what each process has sampled is sent to all",
            "refresh": "the sampler is whole, the model is sharded",
            "shard": "the model is sharded",
            "respond": "each process samples for its share of the prompts",
            "fail": "an error that all processes meet is said once",
            "resolve": "rank 0 alone prints; a checkpoint is not read whole by all",
            "connect": "the processes are connected",
            "open_run": "rank 0 alone writes",
            "catch_signals": "rank 0 alone says so, on its stdout",
            "save_checkpoint": "gathered from all, written by rank 0",
        },
    ),
    ("grpo_lora", "grpo"): (
        60,
        {
            "header": "the adapters' file",
            "RECIPES": "adapters take a larger learning rate",
            "Args.lora_rank": "low-rank adapters",
            "Args.lora_alpha": "low-rank adapters",
            "low_rank": "low-rank adapters",
            "compute_advantages": "the heading of the section stands before another function",
            "main": "adapters are trained and saved; the trained model itself samples",
            "inference_copy": "nothing is copied: sampler, reference and policy have the same weights",
            "add_adapters": "low-rank adapters",
            "load_model": "the weights are not trained: bf16 on a GPU; there must be layers to adapt",
            "save_adapters": "what other libraries load",
        },
    ),
    ("distill", "grpo"): (
        60,
        {
            "RECIPES": "a teacher instead of a KL beside the loss",
            "LOWEST": "no group; no KL beside the loss",
            "Args.beta": "the KL is the loss",
            "Args.teacher": "the teacher takes the place of the reference",
            "Args.full_vocabulary": "the exact KL",
            "compute_advantages": ALGORITHM,
            "reverse_kl": ALGORITHM,
            "policy_loss": "no KL beside the loss",
            "main": "a teacher is loaded; advantages per token, from its log-probabilities and not from rewards",
            "compute_logprobs": "the exact KL, in the same chunks",
            "show": "equal rewards do no harm",
        },
    ),
    ("vapo", "ppo_rlhf"): (
        132,
        {
            "header": "no KL controller",
            "RECIPES": "rewards by rules; value pretraining; no KL; shorter responses need a larger alpha",
            "LOWEST": "no KL and no fixed lambda; the first steps and the added loss may be left out",
            "HIGHEST": "two bounds of the ratio; no fixed lambda",
            "Args.num_prompts": "group sampling",
            "Args.num_generations": "group sampling",
            "Args.num_iterations": "one pass of several minibatches",
            "Args.num_minibatches": "one pass of several minibatches",
            "Args.value_warmup_steps": "value pretraining",
            "Args.reward_model": "rewards by rules unless one is named",
            "Args.missing_eos_penalty": "the paper has none",
            "Args.clip_eps": "two bounds instead of one",
            "Args.clip_eps_low": "Clip-Higher",
            "Args.clip_eps_high": "Clip-Higher",
            "Args.beta": "no KL",
            "Args.kl_target": "no KL",
            "Args.kl_horizon": "no KL",
            "Args.gae_lambda": "lambda depends on the length",
            "Args.gae_alpha": "Length-Adaptive GAE",
            "Args.lm_coef": "the loss on right responses",
            "kl_rewards": "no KL",
            "terminal_rewards": "no KL",
            "adapt_beta": "no KL",
            "adaptive_lambda": "Length-Adaptive GAE",
            "compute_gae": "Decoupled GAE: lambda is an argument",
            "lm_loss": "the loss on right responses",
            "policy_loss": "Clip-Higher; no KL",
            "main": "value pretraining, Decoupled GAE, the loss on right responses; no reference",
            "resolve": "no adaptive KL",
        },
    ),
    ("grpo_tools", "grpo"): (
        100,
        {
            "header": "the tool and what runs it; bisection",
            "TOOL": "the tool",
            "CALL": "what is a call",
            "CALL_END": "what is a call",
            "SHOWN": "how often it calls",
            "SYSTEM_PROMPT": "how to call",
            "RECIPES": "it learns to call faster than to add: a higher rate",
            "LOWEST": "a call may cost nothing",
            "Args.model": "a student that can call",
            "Args.max_calls": "calls of a response",
            "Args.tool_cost": "the cost of a call",
            "Rollout": "two masks, and the tool's answers",
            "main": "the cost of calls, and their metrics; lengths with the tool's tokens",
            "generate": "a call ends a turn; a finished row draws on from longer contexts",
            "compute_logprobs": "the tool's tokens are context",
            "sample_turn": "one turn",
            "first_call": "where a turn ends",
            "respond": "several turns",
            "load_model": "generate asks for the tokenizer",
        },
    ),
    ("grpo_process", "grpo"): (
        65,
        {
            "header": "regular expressions and bisection",
            "SUM": "what a step of the bundled task is",
            "step_rewards": "process supervision",
            "step_tokens": "process supervision",
            "token_advantages": ALGORITHM,
            "main": "the steps, their tokens and their rewards",
        },
    ),
}


def body(script: str) -> str:
    """The file without its docstring."""
    text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    return text[text.index('"""\n\nimport') + 4 :]


def parts(script: str) -> dict[str, str]:
    """Name -> text, with decorators, comments and what stands before it, of each top-level thing and field of Args.

    A constant that is built in several statements is one text.
    """
    source = body(script)
    lines, found, last = source.splitlines(keepends=True), {}, 0
    for node in ast.parse(source).body:
        text = "".join(lines[last : node.end_lineno])  # comments before a node belong to it
        last = node.end_lineno
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            starts = [k for k, item in enumerate(node.body) if isinstance(item, ast.AnnAssign)]
            for first, after in zip(starts, [*starts[1:], len(node.body)], strict=True):
                names = node.body[first:after]
                found[f"Args.{names[0].target.id}"] = "".join(
                    lines[names[0].lineno - 1 : names[-1].end_lineno]
                )
            found["Args"] = "".join(lines[node.lineno - 2 : node.body[0].lineno - 1])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = text
        elif isinstance(node, ast.Assign | ast.AugAssign):
            name = node.targets[0].id if isinstance(node, ast.Assign) else node.target.id
            found[name] = found.get(name, "") + text
        else:
            found["header"] = found.get("header", "") + text
    return found


def changed_lines(parent: str, child: str) -> int:
    """Lines of the child that are not in the parent plus lines of the parent that are gone."""
    diff = difflib.unified_diff(
        body(parent).splitlines(), body(child).splitlines(), n=0, lineterm=""
    )
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)


@pytest.mark.parametrize(("child", "parent"), PAIRS)
def test_siblings_differ_only_where_it_is_listed(child, parent):
    """A changed character, a lost decorator or comment, a renamed or added field, a changed default: all fail here."""
    mine, theirs = parts(child), parts(parent)
    differing = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
    assert differing == set(PAIRS[child, parent][1])
    # Order is part of the text: what both have stands in the same order in both.
    assert [name for name in mine if name in theirs] == [name for name in theirs if name in mine]


@pytest.mark.parametrize(("child", "parent"), PAIRS)
def test_siblings_stay_within_their_budget(child, parent):
    assert changed_lines(parent, child) <= PAIRS[child, parent][0]


@pytest.mark.parametrize("name", SIZES)
def test_the_help_of_a_flag_is_one_line(name):
    """What --help shows of a docstring keeps its line breaks, and would be ragged."""
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    texts = [node.value.value for node in args.body if isinstance(node, ast.Expr)]
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    assert len(texts) == len(fields) and not [text for text in texts if "\n" in text]


def docstrings(source: str) -> set[tuple[int, int]]:
    """Where the strings that stand for themselves begin: of the file, functions, classes and fields."""
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr)]
    return {(n.lineno, n.col_offset) for n in strings if isinstance(n, ast.Constant)}


def count_tokens(source: str) -> int:
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens, strings = tokenize.generate_tokens(io.StringIO(source).readline), docstrings(source)
    return sum(token.type not in skipped and token.start not in strings for token in tokens)


@pytest.mark.parametrize("name", SIZES)
def test_scripts_stay_within_their_size_and_come_to_the_loop_soon(name):
    """Lines can be filled: tokens are counted. A reader meets objective, equations and loop, in that order."""
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    assert count_tokens(source) <= SIZES[name]
    assert max(map(len, lines)) <= 100
    main, loop = (
        lines.index("def main(args: Args) -> dict:"),
        lines.index("    for step in progress:"),
    )
    assert loop - main <= 45 and loop < len(lines) / 2
    headings = ["algorithm", "training", "sampling and log-probabilities", "data", "set-up"]
    assert [line for line in lines if line.startswith("# ====")] == [
        f"# ==== {name} ====" for name in headings
    ]


@pytest.mark.parametrize(("child", "parent"), PAIRS)
def test_the_docstring_names_the_parent(child, parent):
    text = (ROOT / f"{child}.py").read_text(encoding="utf-8")
    assert f"Parent: {parent}.py" in text[: text.index('"""\n\nimport')]


def test_the_guard_sees_a_changed_character(tmp_path, monkeypatch):
    """The guard itself: each of these changes to a child must turn up as a difference that is not listed."""
    original = (ROOT / "dr_grpo.py").read_text(encoding="utf-8")
    changes = {
        "generate": (
            "finished |= torch.isin(token, eos_ids)",
            "finished |= torch.isin(token, eos_ids) ",
        ),
        "micro_batches": ("with padding; by length", "with padding, by length"),
        "evaluate": ("def evaluate(", "@torch.no_grad()\ndef evaluate("),
        "Args.seed": ("    seed: int = 1", "    seed: int = 2"),
        "Args.top_k": (
            "    temperature: float | None = None",
            '    top_k: int = 0\n    """x"""\n    temperature: float | None = None',
        ),
        "main": ("optimizer.step()", "optimizer.step()  # x"),
    }
    for script in ("grpo", "dr_grpo"):
        (tmp_path / f"{script}.py").write_text(
            (ROOT / f"{script}.py").read_text(encoding="utf-8"), encoding="utf-8"
        )
    monkeypatch.setattr(__import__(__name__), "ROOT", tmp_path)
    for name, (old, new) in changes.items():
        assert original.count(old) >= 1, old
        (tmp_path / "dr_grpo.py").write_text(original.replace(old, new, 1), encoding="utf-8")
        mine, theirs = parts("dr_grpo"), parts("grpo")
        assert mine.get(name) != theirs.get(name), name


def test_no_script_asks_which_algorithm_it_is():
    for path in ROOT.glob("*.py"):
        assert not re.search(r"args\.algo", path.read_text(encoding="utf-8"))
