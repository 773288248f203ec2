"""pass@k, the chance that at least one of k samples is right, for a run of any script or for the lesson in
docs/lessons.md.

    python benchmark/passk.py runs/NAME runs/OTHER --samples 128 --problems 200
    python benchmark/passk.py runs/NAME --samples 8 --k 1 8    fewer samples need smaller k
    python benchmark/passk.py runs/NAME --before    also the model that the run began with
    python benchmark/passk.py --lesson    make the missing records of the lesson on pass@k, and its table and picture
    python benchmark/passk.py --draw      the table and the picture alone

The program samples n responses to each of the first held-out problems, with the functions of grpo.py. A run's args.json
says the data set, the prompt, the temperature and the lengths. Its folder has copies of its script and of its task,
with the rewards and the worked examples. The program doesn't check that the data are still those of the run. A response
is right if the first reward gives it 1 (a grade below 1 counts as wrong). If c of the n responses are right, pass@k of
the problem is

    1 - C(n - c, k) / C(n, k)                                        (Chen et al. 2021, arXiv:2107.03374, Eq. 1)

Among all sets of k of the n responses, this is the share of sets with at least one right response. If each response is
right with chance p, the expected value of this share is 1 - (1 - p)^k, the chance that at least one of k new responses
is right. The table gives the mean over the problems, and its standard error over the problems, both in percent, and in
the last column the share of problems without a right response. Each model and each seed gets a line in --out
(runs/passk.jsonl), with the number of right responses to each problem.

The lesson compares a model before and after three kinds of training, with three seeds each. It trains into runs/passk.
Its records are benchmark/records/passk.jsonl. A record's "arm" is the kind of training, or the model without training.
If an arm has a record for a seed, it isn't run again for that seed.
"""

import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from pictures import GRAY, digest, draw_band, panels, save
from shared import FOLDER, ROOT, command_line, fill, provenance, python, read, spread, table, write

sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402

# What a run's args.json says about its held-out problems and about sampling.
SETTINGS = ["dataset", "question_column", "answer_column", "examples", "instructions"]
SETTINGS += ["max_prompt_tokens", "max_new_tokens", "temperature"]

# ==== the estimator ====


def pass_at_k(n: int, c: int, k: int) -> float:
    """pass@k of a problem with c right responses among n, without bias (Chen et al. 2021, Eq. 1).

    The integers are exact, so the result is right to the last bit for any n. Raises ValueError unless 0 <= c <= n and
    1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} right responses of {n}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses: k must be from 1 to {n}")
    sets = math.comb(n, k)
    without_right = math.comb(n - c, k)
    return (sets - without_right) / sets


def curves(n: int, right: list[int], ks: list[int]) -> np.ndarray:
    """pass@k of each problem, (problems, ks). right has the number of right responses to each problem."""
    return np.array([[pass_at_k(n, c, k) for k in ks] for c in right])


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the first axis, the problems. The error includes the noise of sampling.

    The problems are drawn independently, and so are the responses to them. So the spread of the values contains both
    the choice of the problems and the sampling.
    """
    return values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5


def fail(message: str) -> None:
    """End with one line and status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ==== sampling ====


def code_of_run(folder: Path, args: SimpleNamespace) -> tuple[ModuleType, ModuleType]:
    """The copies of the script and of the task in a run's folder, with the copies of utils/ beside them.

    What else the task imports isn't in the folder, but still beside the run's --task, if that is where it was.
    """
    paths = [path for path in folder.glob("*.py") if path.name != "task.py"]
    if len(paths) != 1:
        fail(f"{folder}: {len(paths)} files of Python, and not one copy of a script")
    # Python has loaded grpo.py's utils. They are set aside, so that the copy loads its own.
    loaded, search = take_utils(), list(sys.path)
    names, beside = set(sys.modules), Path(args.task).absolute().parent
    sys.path[:] = [str(folder), *search, str(beside)]
    try:
        spec = importlib.util.spec_from_file_location(f"{paths[0].stem}_of_run", paths[0])
        script = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = script  # a dataclass looks up its module here
        spec.loader.exec_module(script)
        task = script.load_task(SimpleNamespace(task=str(folder / "task.py")))
    finally:
        sys.path[:] = search
        # What the copy and its task have loaded is forgotten, so that the next run loads its own.
        take_utils()
        for name in sys.modules.keys() - names:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == beside:
                del sys.modules[name]
        sys.modules |= loaded
    return script, task


def take_utils() -> dict[str, ModuleType]:
    """Remove the modules of utils/ from those that Python has loaded, and return them."""
    names = [name for name in sys.modules if name.split(".")[0] == "utils"]
    return {name: sys.modules.pop(name) for name in names}


def count_right(script: ModuleType, task: ModuleType, args: SimpleNamespace, samples: int, seed: int) -> list[int]:
    """The number of right responses to each held-out problem, with the prompt and the first reward of a task.

    The sampling is grpo.py's, which fits the model of any script. args.eval_size is the number of problems.
    """
    tokenizer = grpo.AutoTokenizer.from_pretrained(grpo.find_model(args))
    _, problems = script.load_data(args, task, tokenizer)
    if len(problems) < args.eval_size:
        fail(f"--problems {args.eval_size}: there are {len(problems)} held-out problems")
    model, eos_ids = grpo.load_model(args, tokenizer)
    sampler = grpo.inference_copy(model) if model.device.type == "cuda" else model
    right = []
    for number, problem in enumerate(tqdm(problems, desc=args.model, disable=None)):
        # Each problem has its own seed, so that its responses don't depend on the number of problems.
        torch.manual_seed(1_000_003 * seed + number)
        rollout = grpo.sample_responses(args, sampler, [problem], samples, args.temperature, eos_ids)
        completions = grpo.response_texts(tokenizer, rollout, eos_ids)
        scores = script.apply_rewards(task, completions, [problem], model.device)
        right.append(int((scores[task.REWARDS[0].__name__] == 1).sum()))
    return right


def measure(name: str, script: ModuleType, task: ModuleType, args: SimpleNamespace, samples: int, seed: int) -> dict:
    """Sample, and return the record."""
    start = time.perf_counter()
    right = count_right(script, task, args, samples, seed)
    settings = {setting: getattr(args, setting) for setting in SETTINGS}
    dataset = Path(args.dataset)
    if dataset.is_relative_to(ROOT):  # the record doesn't say where the project is on this disk
        settings["dataset"] = str(dataset.relative_to(ROOT))
    return {
        "model": name,
        "sampling_seed": seed,
        "samples": samples,
        "problems": len(right),
        "right": right,
        "settings": settings,
        "seconds": round(time.perf_counter() - start, 1),
        **provenance(),
        "torch": torch.__version__,
    }


def args_of_run(folder: Path, device: str, problems: int, before: bool = False) -> SimpleNamespace:
    """A run's flags, for the model that it has trained, or for the one that it began with."""
    if not (folder / "args.json").is_file() or not (folder / "model").is_dir():
        fail(f"{folder}: give the folder of a finished run, with args.json and model/")
    saved = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    if "max_calls" in saved:  # a flag of grpo_tools.py and of its copies
        fail(f"{folder}: a run with a tool; this program samples without one")
    model = saved["model"] if before else str(folder / "model")
    # The functions of grpo.py also read flags that the run's script may lack.
    flags = vars(grpo.Args()) | saved
    flags |= {"model": model, "device": device, "eval_size": problems}
    return SimpleNamespace(**flags)


def results_table(records: list[dict], ks: list[int]) -> str:
    """A table with a row for each record: pass@k and its standard error, and the problems without a right response."""
    rows = []
    for record in records:
        means, errors = mean_and_error(curves(record["samples"], record["right"], ks))
        cells = [f"{100 * m:.1f} ± {100 * e:.1f}" for m, e in zip(means, errors, strict=True)]
        never = record["right"].count(0) / record["problems"]
        rows.append([record["model"], *cells, f"{100 * never:.1f}"])
    return table(["%", *[f"pass@{k}" for k in ks], "never right"], rows)


# ==== the lesson ====
SEEDS = (1, 2, 3)
SAMPLES, PROBLEMS = 128, 200
SHOWN = (1, 64)  # the columns of the table
DRAWN = list(range(1, 65))  # the points of the picture
RECORDS = FOLDER / "passk.jsonl"
PAGE = ROOT / "docs" / "lessons.md"
PICTURE = ROOT / "docs" / "lessons" / "passk.svg"
TEACHER = "runs/sums-teacher"
BUILD_TEACHER = f"assets/sums/build_sums.py --teacher {TEACHER}"
# The reward is 1 for a right response, and 0 for any other.
RIGHT_ALONE = "assets/sums/right_alone.py"
TRAINING = "--model assets/sums/student --dataset assets/sums --no-examples --num-steps 40"
TRAINING += " --learning-rate 1.5e-4 --no-gradient-checkpointing --eval-every 0 --eval-size 200"
TRAINING += " --device cpu --save-every 0"
# arm: command of the training, without its seed
TRAINED = {
    "GRPO": f"grpo.py {TRAINING} --beta 0",
    "own right samples": f"reinforce_baseline.py {TRAINING} --beta 0 --baseline none --task {RIGHT_ALONE}",
    "distilled": f"distill.py {TRAINING} --teacher {TEACHER}",
}
# arm: (model, seed of the sampling). The second sample of the first model shows what chance alone does.
UNTRAINED = {
    "before": ("assets/sums/student", 1),
    "before, sampled again": ("assets/sums/student", 2),
    "the teacher": (TEACHER, 1),
}


def make_record(arm: str, seed: int) -> dict:
    """Train, unless the run exists, and sample."""
    about = {"arm": arm, "seed": seed}
    if arm in TRAINED:
        about["command"] = TRAINED[arm]
        name = f"{TRAINED[arm].partition('.py')[0]}-{seed}"
        model, sampling_seed = f"runs/passk/{name}", 1
        if not (ROOT / model / "model").is_dir():
            python(f"{TRAINED[arm]} --seed {seed} --runs-dir runs/passk --run-name {name}")
        args = args_of_run(ROOT / model, "cpu", PROBLEMS)
    else:
        model, sampling_seed = UNTRAINED[arm]
        args = grpo.Args(model=str(ROOT / model), examples=False, device="cpu", eval_size=PROBLEMS)
    args.dataset = str(ROOT / "assets" / "sums")
    return about | measure(model, grpo, grpo.load_task(args), args, SAMPLES, sampling_seed)


def make_records() -> None:
    """Make the missing records, and append each to the file."""
    have = {(record["arm"], record["seed"]) for record in read(RECORDS)}
    wanted = [(arm, 1) for arm in UNTRAINED] + [(arm, seed) for seed in SEEDS for arm in TRAINED]
    if not (ROOT / TEACHER / "model.safetensors").is_file():
        python(BUILD_TEACHER)
    for key in wanted:
        if key not in have:
            write(RECORDS, [*read(RECORDS), make_record(*key)])


def read_arms() -> dict[str, list[dict]]:
    """arm -> its records, one for each seed, in the order of the table."""
    arms = {arm: [] for arm in ("before", "before, sampled again", *TRAINED, "the teacher")}
    for record in sorted(read(RECORDS), key=lambda record: record["seed"]):
        arms[record["arm"]].append(record)
    return {arm: found for arm, found in arms.items() if found}


def arm_curves(found: list[dict], ks: list[int]) -> np.ndarray:
    """pass@k for an arm, (seeds, problems, ks)."""
    return np.array([curves(record["samples"], record["right"], ks) for record in found])


def lesson_table() -> str:
    """Markdown: pass@k in percent, and what happens to the problems that were never right before."""
    arms, rows = read_arms(), []
    (before,) = arms["before"]
    was_never = np.array(before["right"]) == 0  # (problems,)
    for arm, found in arms.items():
        each = 100 * arm_curves(found, SHOWN)  # (seeds, problems, ks)
        of_seeds = each.mean(1)  # (seeds, ks)
        _, errors = mean_and_error(each.mean(0))  # (ks,)
        cells = []
        for values, error in zip(of_seeds.T, errors, strict=True):
            cells.append(f"{spread(values.tolist(), 1)} ± {error:.1f}")
        never = np.array([record["right"] for record in found]) == 0  # (seeds, problems)
        for now in (never, was_never & ~never):  # never right, new
            cells.append(spread((100 * now.mean(1)).tolist(), 1))
        rows.append([arm, *cells])
    header = ["%", *[f"pass@{k}" for k in SHOWN]]
    return table([*header, "never right", "new"], rows)


def drawn_from() -> str:
    """The name of the records that the picture contains."""
    names = ("arm", "seed", "right")
    return digest([[record[name] for name in names] for record in read(RECORDS)])


def draw() -> None:
    """pass@k against k. The band of an arm goes from its lowest to its highest seed."""
    arms = read_arms()
    figure, ((ax,),) = panels(1, 1, figsize=(7, 4.8))
    colors = {"before": GRAY} | {arm: f"C{color}" for color, arm in enumerate(TRAINED)}
    for arm, color in colors.items():
        sampled = 100 * arm_curves(arms[arm], DRAWN).mean(1)  # (seeds, ks)
        draw_band(ax, DRAWN, sampled, color, arm)
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
    ax.set(xlabel="k, samples per problem", ylabel="pass@k, %")
    figure.legend(loc="outside lower center", ncols=4)
    save(figure, PICTURE, drawn_from())


def block() -> str:
    """The generated part of the page: picture and table."""
    title = "pass@k before and after three kinds of training"
    return f"![{title}](lessons/{PICTURE.name})\n\n{lesson_table()}"


# ==== the command line ====


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--before", action="store_true", help="also their models before training")
    parser.add_argument("--samples", type=int, default=128, help="n; default 128")
    parser.add_argument("--problems", type=int, default=200, help="the first ones; default 200")
    powers = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--k", type=int, nargs="+", default=powers, help="default 1 2 4 .. 64")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sampling; default 1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/passk.jsonl"))
    parser.add_argument("--lesson", action="store_true", help="make the records of the lesson")
    parser.add_argument("--draw", action="store_true", help="write the lesson's table and picture")
    flags = parser.parse_args()
    if flags.lesson:
        make_records()
    if flags.lesson or flags.draw:
        draw()
        fill(PAGE, "passk", block())
        return

    if not flags.runs:
        fail("give folders of runs")
    if min(flags.k) < 1:
        fail(f"--k {min(flags.k)}: must be at least 1")
    if flags.samples < max(flags.k):
        most = max(flags.k)
        fail(f"--samples {flags.samples}: pass@{most} needs at least {most}; or give a smaller --k")
    if flags.problems < 2:
        fail(f"--problems {flags.problems}: a standard error needs at least 2")
    models = {}
    for folder in flags.runs:
        args = args_of_run(folder, flags.device, flags.problems)
        script, task = code_of_run(folder.resolve(), args)
        if flags.before:
            before = args_of_run(folder, flags.device, flags.problems, before=True)
            models[f"{folder}, before"] = (script, task, before)
        models[str(folder)] = (script, task, args)
    records = []
    for name, (script, task, args) in models.items():
        records.append(measure(name, script, task, args, flags.samples, flags.seed))
        new = (name, flags.seed)
        others = [x for x in read(flags.out) if (x["model"], x["sampling_seed"]) != new]
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        write(flags.out, [*others, records[-1]])
    print(results_table(records, flags.k))
    print(f"{flags.problems} held-out problems, {flags.samples} samples of each; {flags.out}")


if __name__ == "__main__":
    main()
