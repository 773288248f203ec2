"""The scripts are siblings: shared parts have the same text, and this file lists the names of the other parts."""

import ast
import re

import pytest
import siblings
from conftest import ROOT
from scripts import SCRIPTS, parent_of, read_script
from siblings import body, differing_names, parts

# Each child with the names of what differs from its parent: functions, classes and constants of
# the file, Args.<field>, and "header" for the import lines. README.md says why they differ.
# `python tools/siblings.py` prints this literal.
PAIRS = {
    "rloo": {
        "Args.baseline",
        "Args.num_generations",
        "Args.num_prompts",
        "DECAY",
        "check_args",
        "compute_advantages",
        "compute_baseline",
        "main",
        "update_average",
    },
    "grpo": {
        "Args.beta",
        "Args.clip_eps",
        "Args.num_iterations",
        "Args.num_minibatches",
        "CLIP_FRAC_EPS",
        "check_args",
        "compute_advantages",
        "compute_returns",
        "header",
        "main",
        "minibatches",
        "policy_loss",
    },
    "dr_grpo": {
        "Args.beta",
        "BUNDLED",
        "compute_advantages",
        "header",
        "policy_loss",
    },
    "dapo": {
        "Args.beta",
        "Args.clip_eps",
        "Args.clip_eps_high",
        "Args.clip_eps_low",
        "Args.max_resample",
        "Args.num_prompts",
        "Args.overlong_cache",
        "BUNDLED",
        "SampledGroups",
        "check_args",
        "header",
        "main",
        "merge_rollouts",
        "mixed_groups",
        "overlong_penalty",
        "policy_loss",
        "reference_copy",
        "sample_mixed_groups",
        "shuffled_batches",
    },
    "ppo_rlhf": {
        "Args.beta",
        "Args.clip_eps",
        "Args.gae_lambda",
        "Args.gamma",
        "Args.missing_eos_penalty",
        "Args.num_generations",
        "Args.num_iterations",
        "Args.num_prompts",
        "Args.reward_model",
        "Args.value_clip_eps",
        "Args.value_init",
        "Args.value_learning_rate",
        "Args.vf_coef",
        "BUNDLED",
        "REWARDS",
        "check_args",
        "compute_advantages",
        "compute_gae",
        "compute_scores",
        "compute_values",
        "evaluate",
        "explained_variance",
        "header",
        "kl_rewards",
        "load_classifier",
        "load_data",
        "load_reward_model",
        "load_value_model",
        "main",
        "minibatches",
        "policy_loss",
        "rollout_scores",
        "rollout_values",
        "score_responses",
        "unpadded",
        "value_loss",
        "whiten",
    },
    "gspo": {
        "Args.beta",
        "Args.clip_eps",
        "Args.clip_eps_high",
        "Args.clip_eps_low",
        "Args.num_minibatches",
        "BUNDLED",
        "check_args",
        "main",
        "policy_loss",
    },
    "remax": {
        "Args.baseline",
        "DECAY",
        "compute_advantages",
        "compute_baseline",
        "main",
        "update_average",
    },
    "grpo_offpolicy": {
        "Args.dual_clip",
        "Args.rollout_correction",
        "Args.sampler_dtype",
        "Args.sequence_cap",
        "Args.staleness",
        "Rollout",
        "check_args",
        "compute_sampler_weights",
        "inference_copy",
        "main",
        "policy_loss",
    },
    "grpo_process": {
        "COLUMN_SUM",
        "REWARDS",
        "Step",
        "header",
        "is_true_sum",
        "main",
        "policy_loss",
        "step_rewards",
        "step_tokens",
        "token_advantages",
    },
    "grpo_multigpu": {
        "Args.device",
        "LogprobModel",
        "MicroBatch",
        "WHOLE",
        "ask_rank_0",
        "check_args",
        "connect",
        "evaluate",
        "gather_objects",
        "gather_rows",
        "header",
        "load_checkpoint",
        "log_metrics",
        "main",
        "num_processes",
        "open_logs",
        "own_micro_batches",
        "process_rank",
        "refresh_sampler",
        "rollout_logprobs",
        "sample_responses",
        "save_checkpoint",
        "shard",
        "sum_over_processes",
    },
    "grpo_lora": {
        "Args.learning_rate",
        "Args.lora_alpha",
        "Args.lora_rank",
        "BUNDLED",
        "SEGMENT",
        "add_adapters",
        "add_low_rank",
        "compute_advantages",
        "header",
        "inference_copy",
        "load_model",
        "main",
        "merge_adapters",
        "reference_copy",
        "save_adapters",
    },
    "distill": {
        "Args.beta",
        "Args.teacher",
        "BUNDLED",
        "check_args",
        "compute_advantages",
        "load_teacher",
        "main",
        "policy_loss",
        "reference_copy",
    },
    "self_distill": {
        "Args.context_column",
        "Args.context_template",
        "Args.max_teacher_tokens",
        "Args.teacher",
        "Args.teacher_rate",
        "BUNDLED",
        "CONTEXT_TEMPLATE",
        "add_contexts",
        "check_args",
        "load_config",
        "load_data",
        "load_teacher",
        "main",
        "move_teacher",
        "render",
    },
    "vapo": {
        "Args.beta",
        "Args.clip_eps",
        "Args.clip_eps_high",
        "Args.clip_eps_low",
        "Args.gae_alpha",
        "Args.gae_lambda",
        "Args.lm_coef",
        "Args.missing_eos_penalty",
        "Args.num_generations",
        "Args.num_iterations",
        "Args.num_minibatches",
        "Args.num_prompts",
        "Args.reward_model",
        "Args.value_init",
        "Args.value_warmup_steps",
        "BUNDLED",
        "REWARDS",
        "adaptive_lambda",
        "check_args",
        "compute_gae",
        "compute_scores",
        "discounted_returns",
        "evaluate",
        "kl_rewards",
        "lm_loss",
        "load_classifier",
        "load_data",
        "load_reward_model",
        "load_value_model",
        "main",
        "policy_loss",
        "reference_copy",
        "rollout_scores",
        "score_responses",
        "terminal_rewards",
    },
    "grpo_tools": {
        "Args.max_calls",
        "Args.max_new_tokens",
        "Args.tool_cost",
        "BUNDLED",
        "CALL_END",
        "CALL_START",
        "ERROR",
        "INSTRUCTIONS",
        "MAX_CHARS",
        "OPERATORS",
        "Response",
        "Rollout",
        "TOOL",
        "TOOL_SECONDS",
        "Turn",
        "calculator",
        "cut_at_call",
        "evaluate",
        "exact_value",
        "generate",
        "header",
        "main",
        "pad_left",
        "pad_right",
        "response_states",
        "run_tool",
        "sample_responses",
        "sample_turn",
    },
    "grpo_vllm": {
        "Args.cuda_graph",
        "Args.device",
        "Args.engine_dtype",
        "Args.engine_memory",
        "Args.sampler_dtype",
        "Args.sampling_tokens",
        "Args.staleness",
        "CHUNK_LOGITS",
        "SEGMENT",
        "SMALL_CACHE",
        "evaluate",
        "generate",
        "header",
        "inference_copy",
        "load_engine",
        "main",
        "pad",
        "policy_loss",
        "refresh_engine",
        "sample_responses",
        "select_rows",
    },
}


def test_every_script_with_a_parent_is_listed():
    children = [name for name in SCRIPTS if parent_of(name) is not None]
    assert list(PAIRS) == children
    for child in children:
        assert SCRIPTS.index(parent_of(child)) < SCRIPTS.index(child), "the parent comes first"


@pytest.mark.parametrize("child", PAIRS)
def test_siblings_differ_only_where_it_is_listed(child):
    """This test fails if a character, decorator or comment changes, or if a field is added, removed or renamed."""
    assert differing_names(child) == PAIRS[child]
    mine = parts(child)
    theirs = parts(parent_of(child))
    # Both files have their common parts in the same order.
    assert [name for name in mine if name in theirs] == [name for name in theirs if name in mine]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_character_belongs_to_a_part(name):
    """If some text belonged to no part, a change there could hide."""
    assert sum(len(text) for text in parts(name).values()) == len(body(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_of_a_flag_is_one_line(name):
    """--help keeps a docstring's line breaks, and two lines would look ragged."""
    classes = [node for node in ast.parse(read_script(name)).body if isinstance(node, ast.ClassDef)]
    (args,) = [node for node in classes if node.name == "Args"]
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    texts = [node.value.value for node in args.body if isinstance(node, ast.Expr)]
    assert len(texts) == len(fields)
    for text in texts:
        assert "\n" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_reader_comes_to_the_loop_soon(name):
    """The first half of a script has the objective, the equations and the loop, in this order."""
    lines = read_script(name).splitlines()
    assert max(len(line) for line in lines) <= 100
    main = lines.index("def main(args: Args) -> dict:")
    loop = lines.index("    for step in progress:")
    assert main < loop < len(lines) / 2
    headings = ["algorithm", "training", "sampling and log-probabilities", "data and model", "runs"]
    own = {"grpo_tools": ["the tool"], "grpo_multigpu": ["processes"]}.get(name, [])
    found = [line.strip("# =") for line in lines if line.startswith("# ====")]
    assert [heading for heading in found if heading not in own] == headings
    assert [heading for heading in found if heading in own] == own


def test_the_guard_sees_a_changed_character(tmp_path, monkeypatch):
    """For each of these changes to dr_grpo.py, the guard must report the part that contains the change."""
    changes = {
        "generate": (
            "finished |= torch.isin(token, eos_ids)",
            "finished |= torch.isin(token, eos_ids) ",
        ),
        "micro_batches": ('max_tokens):\n    """', 'max_tokens):\n    """ '),
        "rollout_logprobs": ("@torch.no_grad()\ndef rollout_", "def rollout_"),
        "inference_copy": ("def inference_copy(", "# x\ndef inference_copy("),
        "evaluate": ("def evaluate(", "@torch.no_grad()\ndef evaluate("),
        "Args.seed": ("    seed: int = 1", "    seed: int = 2"),
        "Args.top_k": (
            "    temperature: float = 0.9",
            '    top_k: int = 0\n    """x"""\n    temperature: float = 0.9',
        ),
        "Args": ("    # ---- sampling", "    # ---- samples"),
        "main": ("optimizer.step()", "optimizer.step()  # x"),
        "header": ('if __name__ == "__main__":', 'if __name__ in ("__main__", "x"):'),
    }
    original = read_script("dr_grpo")
    (tmp_path / "grpo.py").write_text(read_script("grpo"), encoding="utf-8")
    monkeypatch.setattr("scripts.ROOT", tmp_path)
    for name, (old, new) in changes.items():
        assert original.count(old) >= 1, old
        (tmp_path / "dr_grpo.py").write_text(original.replace(old, new, 1), encoding="utf-8")
        assert parts("dr_grpo").get(name) != parts("grpo").get(name), name


def test_the_printed_names_can_be_pasted(capsys, monkeypatch):
    """tools/siblings.py prints PAIRS as a Python literal."""
    monkeypatch.setattr("sys.argv", ["siblings.py"])
    siblings.main()
    printed = capsys.readouterr().out
    comments, literal = printed.split("PAIRS = ")
    assert ast.literal_eval(literal) == {child: differing_names(child) for child in PAIRS}
    assert len(comments.splitlines()) == len(PAIRS)


def test_no_script_asks_which_algorithm_it_is():
    for path in ROOT.glob("*.py"):
        assert not re.search(r"args\.algo", path.read_text(encoding="utf-8"))
