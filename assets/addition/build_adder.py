"""Rebuilds the additions, adder and judge from a seed, on two CPU cores: python assets/addition/build_adder.py

train.jsonl, test.jsonl            all additions of two numbers from 0 to 99, with 500 held out for the test. Someone
                                   who has practised 47+38 knows 38+47, too. So mirror images are held out as well.
adder/                             the policy: a Llama of 0.86 M parameters, trained to imitate a student who forgets
                                   to carry. After "47+38=" it writes the units, the tens and the answer,
                                       <think>7+8=15,4+3+1=8</think><answer>85</answer></s>
                                   but its training solutions left out 60 % of the carries (4+3=7, answer 75), and the
                                   answer tags in a quarter of all cases. In greedy decoding it always makes the first
                                   mistake and never the second. When sampled, it makes both.
judge/                             the reward model: the same network with a score instead of a vocabulary, read at the
                                   last token of question and completion. It prefers a right solution to any other
                                   completion, whether the result, a step of the reasoning or the form is wrong.

Strict accuracy below: the number in the only answer block is the sum. The questions are those of test.jsonl.
Measured: the adder's accuracy is 0.542 greedy and 0.566 at temperature 1; 1.000 and 0.764 of its responses are
well-formed. The judge is right on 0.998 of the pairs sampled for held-out questions. Its AUC between right and wrong
samples of different questions is 0.9995.
The build takes about 12 minutes on two busy cores, most of it for the judge.
Another processor rounds differently. Weights that are rebuilt there have the same quality, but not the same bits.
"""

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

NUM_TEST = 500
# The share of solutions without the carry, among questions that have a carry.
FORGET_CARRY = 0.60
# The share of solutions without answer tags, among all questions.
OMIT_TAGS = 0.25
MAX_NEW_TOKENS = 32  # the longest solution has 23
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TOKEN = r"</?think>|</?answer>|</s>|[\s\S]"


# ==== questions and solutions ====


def make_questions(rng):
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    test = pairs[:NUM_TEST]
    held_out = set(test) | {(b, a) for a, b in test}
    return [pair for pair in pairs if pair not in held_out], test


def prompt(numbers):
    return "+".join(map(str, numbers)) + "="


def solution(pair, forget=False, tags=True):
    """The student's text after the prompt: the units first, then the tens, then the answer."""
    (a_tens, a_units), (b_tens, b_units) = divmod(pair[0], 10), divmod(pair[1], 10)
    units = a_units + b_units
    carry = units >= 10 and not forget
    tens = a_tens + b_tens + carry
    thought = f"{a_units}+{b_units}={units},{a_tens}+{b_tens}{'+1' if carry else ''}={tens}"
    answer = 10 * tens + units % 10
    return f"<think>{thought}</think>" + (
        f"<answer>{answer}</answer></s>" if tags else f"{answer}</s>"
    )


def well_formed(text):
    return re.fullmatch(r"<think>[^<>]+</think><answer>[^<>]+</answer></s>", text) is not None


def right(pair, text):
    blocks = re.findall(r"<answer>(.*?)</answer>", text)
    return len(blocks) == 1 and blocks[0] == str(sum(pair))


# ==== tokenizer, batches, sampling ====


def make_tokenizer(more_tags=(), pattern=TOKEN):
    """One token for each tag and each character. more_tags get the last ids, and the pattern finds them."""
    vocab = [
        "<unk>",
        "<pad>",
        "</s>",
        *TAGS,
        *"0123456789+=, .:-*/?!<>\nabcdefghijklmnopqrstuvwxyz",
        *more_tags,
    ]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>")
    )
    # The tags are ordinary words, so decoding with skip_special_tokens=True keeps them.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    # Without a decoder the tokens would be joined with spaces.
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=256,
    )


def make_batch(tokenizer, pairs, texts):
    """Prompts with their completions, right-padded, and the mask of the completions' tokens."""
    both = [prompt(pair) + text for pair, text in zip(pairs, texts, strict=True)]
    ids = tokenizer(
        both, padding=True, padding_side="right", return_tensors="pt"
    ).input_ids  # (N, T)
    starts = torch.tensor([len(prompt(pair)) for pair in pairs])[:, None]
    mask = (torch.arange(ids.shape[1]) >= starts) & (ids != tokenizer.pad_token_id)  # (N, T)
    return ids, mask


@torch.no_grad()
def sample(adder, tokenizer, pairs, temperature, max_new_tokens=MAX_NEW_TOKENS):
    """One completion for each pair, as text that includes </s>. Temperature 0 is greedy."""
    adder.eval()
    texts = [""] * len(pairs)
    # Prompts of equal length need no padding.
    for length in sorted({len(prompt(pair)) for pair in pairs}):
        rows = [i for i, pair in enumerate(pairs) if len(prompt(pair)) == length]
        ids, cache, response = (
            tokenizer([prompt(pairs[i]) for i in rows], return_tensors="pt").input_ids,
            None,
            [],
        )
        for _ in range(max_new_tokens):
            output = adder(ids, past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[:, -1]
            if temperature == 0:
                ids = logits.argmax(-1, keepdim=True)
            else:
                ids = torch.multinomial((logits / temperature).softmax(-1), 1)
            response.append(ids)
        for i, text in zip(rows, tokenizer.batch_decode(torch.cat(response, 1)), strict=True):
            head, eos, _ = text.partition("</s>")
            texts[i] = head + eos
    return texts


# ==== training ====


def llama_config(tokenizer, hidden_size=128, num_hidden_layers=4, **kwargs):
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // 32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **kwargs,
    )


def train(module, num_steps, compute_loss, name):
    """Adam with a short warm-up and a cosine to zero. Larger models would need a lower learning rate."""
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01
    )
    module.train()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(
                (step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
            )
        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0 or step == num_steps - 1:
            print(f"{name}: step {step}, loss {loss.item():.3f}", flush=True)
    module.eval()


def train_adder(
    tokenizer,
    questions,
    rng,
    num_steps=750,
    batch_size=128,
    forget_carry=FORGET_CARRY,
    omit_tags=OMIT_TAGS,
    **size,
):
    adder = LlamaForCausalLM(llama_config(tokenizer, **size))
    adder.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )

    def compute_loss():
        pairs = rng.choices(questions, k=batch_size)
        # Both faults are drawn again each time. So the student is undecided on every question, instead of wrong on
        # some questions.
        faults = [(rng.random() < forget_carry, rng.random() >= omit_tags) for _ in pairs]
        texts = [solution(pair, *fault) for pair, fault in zip(pairs, faults, strict=True)]
        ids, mask = make_batch(tokenizer, pairs, texts)
        return adder(ids, labels=ids.masked_fill(~mask, -100)).loss

    train(adder, num_steps, compute_loss, "adder")
    return adder


def slip(rng, pair):
    """A solution with one or two wrong steps, and later steps that follow from them. Policies make such mistakes."""
    (a_tens, a_units), (b_tens, b_units) = divmod(pair[0], 10), divmod(pair[1], 10)
    steps = rng.choices(["copy", "units", "carry", "tens"], k=rng.randint(1, 2))
    digits = [a_units, b_units, a_tens, b_tens]
    if "copy" in steps:
        digits[rng.randrange(4)] = rng.randrange(10)
    units = digits[0] + digits[1]
    if "units" in steps:
        units = rng.choice([abs(units + rng.choice([-10, -2, -1, 1, 2, 10])), rng.randrange(19)])
    carry = (units >= 10) != ("carry" in steps)
    tens = digits[2] + digits[3] + carry
    if "tens" in steps:
        tens = rng.choice([abs(tens + rng.choice([-10, -2, -1, 1, 2, 10])), rng.randrange(20)])
    thought = (
        f"{digits[0]}+{digits[1]}={units},{digits[2]}+{digits[3]}{'+1' if carry else ''}={tens}"
    )
    return f"<think>{thought}</think><answer>{10 * tens + units % 10}</answer></s>"


def corrupt(rng, pair):
    """A hard negative: close to the right solution, but wrong or badly formed. By chance, it may still be right."""
    text, answer = solution(pair), str(sum(pair))
    block, tokens = f"<answer>{answer}</answer>", re.findall(TOKEN, text)
    digits = [place for place, token in enumerate(tokens) if token.isdigit()]
    wrong = str(abs(sum(pair) + rng.choice([-100, -11, -10, -9, -1, 1, 9, 10, 100])))
    kind = rng.choice(
        ["slip"] * 8
        + ["digit"] * 3
        + ["answer"] * 3
        + ["fault", "cut", "twice", "empty", "extra", "edits"]
    )
    # A wrong digit in the reasoning or in the answer.
    if kind == "digit":
        tokens[rng.choice(digits)] = rng.choice("0123456789")
        return "".join(tokens)
    # Right reasoning, but a wrong answer.
    if kind == "answer":
        tokens[rng.choice(digits[-len(answer) :])] = rng.choice("0123456789")
        return rng.choice(["".join(tokens), text.replace(block, f"<answer>{wrong}</answer>")])
    if kind == "slip":
        return slip(rng, pair)
    if kind == "fault":
        return solution(pair, forget=rng.random() < 0.8, tags=rng.random() < 0.8)
    if kind == "cut":
        return "".join(tokens[: rng.randrange(len(tokens))])
    if kind == "twice":
        return text.replace(
            block, block + rng.choice([block, f"<answer>{wrong}</answer>", answer, "<answer>"])
        )
    if kind == "empty":
        return (
            rng.choice(["<think></think>", f"<think>{answer}</think>", ""])
            + rng.choice([block, answer])
            + "</s>"
        )
    if kind == "extra":
        junk = "".join(rng.choices(tokens[:-1], k=rng.randint(1, 8)))
        place = rng.choice(["</think>", "</s>"])
        return text.replace(
            place, rng.choice([junk + place, place + junk if place == "</think>" else junk])
        )
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(tokens))
        tokens[place : place + rng.randint(0, 1)] = rng.choices(
            [*TAGS, *"0123456789+=,"], k=rng.randint(0, 1)
        )
    return "".join(tokens).partition("</s>")[0] + "</s>"


def train_judge(adder, tokenizer, questions, rng, num_steps=1500, batch_size=32):
    # A sample is right only if it is the right solution, word for word. So there is no need to sample the winners.
    losers = {pair: [] for pair in questions}
    for temperature in (1.0, 1.3, 1.6):
        sampled = rng.sample(questions, 4000)
        for pair, text in zip(sampled, sample(adder, tokenizer, sampled, temperature), strict=True):
            losers[pair] += [text] if text != solution(pair) else []

    judge = LlamaForSequenceClassification(llama_config(tokenizer, num_labels=1))
    judge.model.load_state_dict(adder.model.state_dict())
    # The judge has to compare the completion with the right solution. A network this small learns that slowly from one
    # bit per pair. Two extra heads help it, and are thrown away afterwards. After layer 2, one head predicts the next
    # token of the right solution. After layer 3, the other predicts whether the token just read was right. Then layer 4
    # only has to find an error.
    next_token, on_track = torch.nn.Linear(128, len(tokenizer)), torch.nn.Linear(128, 1)

    def compute_loss():
        # Two losers for every winner.
        pairs = rng.choices(questions, k=batch_size)
        texts = [
            rng.choice(losers[p]) if losers[p] and rng.random() < 0.3 else corrupt(rng, p)
            for p in pairs * 2
        ]
        for i, pair in enumerate(pairs * 2):
            while texts[i] == solution(pair):
                texts[i] = corrupt(rng, pair)
        ids, mask = make_batch(tokenizer, pairs * 3, [*map(solution, pairs), *texts])
        output = judge.model(ids, output_hidden_states=True)
        last = (ids != tokenizer.pad_token_id).sum(1) - 1
        scores = judge.score(output.last_hidden_state[torch.arange(len(ids)), last])[:, 0]
        won, lost = scores[:batch_size].repeat(2), scores[batch_size:]
        # Bradley-Terry fixes only differences within a question. The other two terms fix the scale and put the middle
        # of every pair at zero. So scores are comparable across questions, and a policy gradient needs that.
        loss = (
            -F.logsigmoid(won - lost) + 0.01 * (won**2 + lost**2) + 0.1 * (won + lost) ** 2
        ).mean()

        right_ids, right_mask = ids[:batch_size], mask[:batch_size]
        logits = next_token(output.hidden_states[2][:batch_size, :-1])
        next_loss = F.cross_entropy(logits[right_mask[:, 1:]], right_ids[:, 1:][right_mask[:, 1:]])
        # This ends with the first token that differs from the right solution. Later tokens are neither right nor wrong.
        same = (ids == right_ids.repeat(3, 1)).long().cummin(1).values
        up_to = mask & (F.pad(same[:, :-1], (1, 0), value=1) == 1)
        track_loss = F.binary_cross_entropy_with_logits(
            on_track(output.hidden_states[3])[up_to][:, 0], same[up_to].float()
        )
        return loss + 0.5 * next_loss + track_loss

    train(torch.nn.ModuleList([judge, next_token, on_track]), num_steps, compute_loss, "judge")
    return judge


def prepare(description, seed, out):
    """For a builder that uses one core: its arguments, the questions, and the tokenizer that all builders share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args()
    # More threads would add numbers in another order.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    questions, test = make_questions(random.Random(1))  # assets/addition
    return args, questions, test, make_tokenizer()


# ==== checks ====


def check_adder(adder, tokenizer, test):
    for name, temperature in (("greedy", 0), ("sampled", 1.0)):
        texts = sample(adder, tokenizer, test, temperature)
        intended = [
            {solution(pair, forget, tags) for forget in (0, 1) for tags in (0, 1)} for pair in test
        ]
        shares = {
            "strict accuracy": map(right, test, texts),
            "well-formed": map(well_formed, texts),
            "right or wrong as intended": (
                text in known for text, known in zip(texts, intended, strict=True)
            ),
        }
        print(
            f"adder, {name}: "
            + ", ".join(f"{key} {sum(hits) / len(test):.3f}" for key, hits in shares.items())
        )


@torch.no_grad()
def check_judge(judge, adder, tokenizer, test, rng, num_samples=8):
    pairs = test * num_samples
    texts = sample(adder, tokenizer, pairs, 1.0)
    texts += [corrupt(rng, pair) for pair in pairs]
    good = torch.tensor(
        [right(p, t) and well_formed(t) for p, t in zip(pairs + pairs, texts, strict=True)]
    )
    scores = judge(make_batch(tokenizer, pairs + pairs, texts)[0]).logits[:, 0]
    (scores, corrupt_scores), (good, corrupt_good) = scores.chunk(2), good.chunk(2)
    winners, losers = scores[good], scores[~good]
    same_question = torch.arange(len(pairs)) % len(test)
    comparable = same_question[good][:, None] == same_question[~good]
    wins = winners[:, None] > losers
    hard = winners[:, None] > corrupt_scores[~corrupt_good]
    print(
        f"judge, on samples: pair accuracy {wins[comparable].float().mean():.4f} ({comparable.sum()} pairs), "
        f"across questions (AUC) {wins.float().mean():.4f}, against hard negatives (AUC) {hard.float().mean():.4f}\n"
        f"judge, scores: mean {scores.mean():.2f}, standard deviation {scores.std():.2f}, "
        f"of right samples {winners.mean():.2f}, of others {losers.mean():.2f}"
    )


def main():
    parser = argparse.ArgumentParser(
        description="Rebuild the bundled questions, policy and reward model."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    args = parser.parse_args()
    start = time.time()
    # The number of threads decides the order of additions, and so it decides the last bits of the weights.
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    questions, test = make_questions(rng)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", questions), ("test", test)):
        lines = [
            json.dumps({"question": prompt(pair), "answer": str(sum(pair))}) + "\n"
            for pair in pairs
        ]
        (args.out / f"{name}.jsonl").write_text("".join(lines))

    tokenizer = make_tokenizer()
    adder = train_adder(tokenizer, questions, rng)
    check_adder(adder, tokenizer, test)
    judge = train_judge(adder, tokenizer, questions, rng)
    check_judge(judge, adder, tokenizer, test, rng)
    for name, model in (("adder", adder), ("judge", judge)):
        model.save_pretrained(args.out / name)
        tokenizer.save_pretrained(args.out / name)
    print(f"{(time.time() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
