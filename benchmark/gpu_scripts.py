"""benchmark/records/gpu-scripts.jsonl: three steps of each script on a GPU, with the defaults of --model.

    python benchmark/gpu_scripts.py --problems train.jsonl     random weights in the shape of SmolLM2-1.7B
    python benchmark/gpu_scripts.py --tiny                     a tiny shape; without a GPU, on an emulated one

train.jsonl is GSM8K's, from github.com/openai/grade-school-math. Random weights get no answer right and end few
responses. So nearly all samples have the full 300 tokens, which is the most work that a step can cause. dapo.py
would find no group to learn from, so it samples only once. benchmark/records/gpu-scripts.jsonl gets one line for each
run: its command, commit (and "dirty", if the tree had changes), GPU, versions, and the metrics of the last step.

If grpo is among the scripts, the benchmark then kills a run of grpo.py in its third step and starts it again.
--memory-gb 41.5 skips this part, and gives each script only 41.5 GB of a larger GPU, as much as a program has on a
40 GB card, and the default batch sizes instead of larger ones.

The models, a checkpoint and the trained model need 42 GB of disk for self_distill.py, 39 GB for grpo_offpolicy.py, and
at most 35 GB for each other script. The killed run and the scripts with a critic have half the layers, so that they
don't need more. TMPDIR chooses the disk. grpo_multigpu.py isn't tested here. grpo_vllm.py runs only if --scripts names
it.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from records import FOLDER, ROOT, provenance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(ROOT / "tools"))

from scripts import CRITICS, MULTI_PROCESS, NEEDS_VLLM, SCRIPTS  # noqa: E402

RECORDS = FOLDER / "gpu-scripts.jsonl"
SHOWN = [
    "time/rollout_s",
    "time/tokens_per_s",
    "time/update_s",
    "time/peak_mem_gb",
    "rollout/logprob_gap",
]
SHAPE = dict(
    num_hidden_layers=24,
    hidden_size=2048,
    num_attention_heads=32,
    intermediate_size=8192,
    vocab_size=49152,
)
TINY = dict(
    num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=512
)


def make_models(folder: Path, problems: Path, shape: dict) -> None:
    """Write three models in bf16, with random weights: a policy of this shape, a policy with half its layers, and a
    reward model with half its layers.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = dict(
        vocab_size=shape["vocab_size"], special_tokens=["<eos>"], initial_alphabet=alphabet
    )
    trainer = trainers.BpeTrainer(**trainer, show_progress=False)
    tokenizer.train_from_iterator(problems.open(encoding="utf-8"), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    )
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("policy", "half", "judge"):
        layers = shape["num_hidden_layers"] // (1 if name == "policy" else 2)
        fields = shape | dict(num_hidden_layers=layers, max_position_embeddings=8192, num_labels=1)
        config = LlamaConfig(**fields, tie_word_embeddings=True)
        config.update(dict(eos_token_id=0, pad_token_id=0, bos_token_id=None))
        kind = AutoModelForSequenceClassification if name == "judge" else AutoModelForCausalLM
        # Drawing the weights takes a second on a GPU, and many seconds on a CPU.
        with device:
            model = kind.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    # The scripts need the memory of the GPU.
    del model
    torch.cuda.empty_cache()


def own_flags(script: str, folder: Path) -> list[str]:
    """The model of the script, and the flags that only this script needs."""
    model = "half" if script in CRITICS else "policy"
    flags = ["--model", str(folder / model)]
    if script == "ppo_rlhf":
        flags += ["--reward-model", str(folder / "judge")]
    elif script == "vapo":
        flags += ["--value-warmup-steps", "1"]
    elif script == "dapo":
        flags += ["--max-resample", "0", "--overlong-cache", "10"]  # less than --tiny's 12 tokens
    elif script == "distill":
        flags += ["--teacher", str(folder / "policy")]
    return flags


def launch(command: list[str], memory_gb: float | None) -> list[str]:
    """The command for this machine: with part of the GPU's memory, or on an emulated GPU if there is none."""
    if not torch.cuda.is_available():
        return [sys.executable, "tests/emulated_cuda", shlex.join(command)]
    if memory_gb is None:
        return [sys.executable, *command]
    fraction = memory_gb * 1e9 / torch.cuda.get_device_properties(0).total_memory
    limit = f"import runpy, sys, torch; torch.cuda.set_per_process_memory_fraction({fraction})"
    program = f"{limit}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return [sys.executable, "-c", program, *command]


def last_metrics(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])


def interrupted(command: list[str], run: Path) -> None:
    """Start a run, kill it in its third step, repeat its command, and print how both ended."""
    metrics, log = run / "metrics.jsonl", run.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(launch(command, None), cwd=ROOT, stdout=file, stderr=file)
        while process.poll() is None and (
            not metrics.exists() or len(metrics.read_text().splitlines()) < 3
        ):
            time.sleep(0.1)
        process.kill()
        status = process.wait()
    if not metrics.exists():
        print(f"killed: the run failed\n{log.read_text()[-2000:]}")
        return
    stopped_at = last_metrics(run)["step"]
    again = subprocess.run(launch(command, None), cwd=ROOT, capture_output=True, text=True)
    print(f"killed: status {status} after step {stopped_at}; started again: ", end="")
    print(f"status {again.returncode}, step {last_metrics(run)['step']}", flush=True)
    if again.returncode:
        print((again.stdout + again.stderr)[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", type=Path, default=ROOT / "assets" / "addition" / "train.jsonl"
    )
    default = [name for name in SCRIPTS if name not in MULTI_PROCESS + NEEDS_VLLM]
    parser.add_argument("--scripts", nargs="*", default=default)
    parser.add_argument("--flags", default="", help="more flags for all scripts")
    parser.add_argument("--memory-gb", type=float, help="the part of the GPU's memory to use")
    parser.add_argument("--tiny", action="store_true", help="self-test, without a record")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("error: torch finds no CUDA device; --tiny emulates one", file=sys.stderr)
        raise SystemExit(2)
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.disable_progress_bar()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "emulated"
    print(
        f"{'':20}{'rollout s':>10}{'tokens/s':>10}{'update s':>10}{'peak GB':>10}{'gap':>10}  on: {device}"
    )
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_models(folder, options.problems, TINY if options.tiny else SHAPE)
        common = ["--dataset", str(options.problems.resolve()), "--device", "cuda"]
        common += ["--runs-dir", str(folder), "--eval-size", "64"]
        common += ["--save-every", "0"]
        if options.tiny:
            common += ["--num-prompts", "2", "--max-new-tokens", "12"]
        if options.memory_gb is None and not options.tiny:
            # For a GPU of 60 GB or more. The defaults fit on 40 GB.
            common += ["--sampling-tokens", "131072", "--micro-batch-tokens", "8192"]
        common += shlex.split(options.flags)
        for script in options.scripts:
            command = [f"{script}.py", *common, "--num-steps", "3", "--run-name", script]
            command += own_flags(script, folder)
            done = subprocess.run(
                launch(command, options.memory_gb), cwd=ROOT, capture_output=True, text=True
            )
            if (folder / script / "model").is_dir():
                metrics = last_metrics(folder / script)
                print(
                    f"{script:20}" + "".join(f"{metrics[name]:10.3g}" for name in SHOWN), flush=True
                )
                if not options.tiny:
                    record = {
                        "command": shlex.join(command).replace(f"{folder}/", ""),
                        "memory_gb": options.memory_gb,
                        "gpu": device,
                        **provenance(),
                    }
                    with RECORDS.open("a", encoding="utf-8") as file:
                        print(json.dumps(record | {"metrics": metrics}), file=file)
            else:
                print(f"{script} failed:\n{(done.stdout + done.stderr)[-2000:]}", flush=True)
            # The next run needs the disk.
            shutil.rmtree(folder / script, ignore_errors=True)
        interrupt = "grpo" in options.scripts and options.memory_gb is None
        if interrupt:
            command = ["grpo.py", *common, "--num-steps", "4", "--run-name", "killed"]
            command += ["--save-every", "1", "--model", str(folder / "half")]
            interrupted(command, folder / "killed")
            shutil.rmtree(folder / "killed", ignore_errors=True)


if __name__ == "__main__":
    main()
