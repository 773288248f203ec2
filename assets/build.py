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

MAX_NEW_TOKENS = 32
FORGET_CARRY = 0.60
OMIT_TAGS = 0.25


# ==== questions and solutions ====


def make_questions(rng):
    """All additions of two numbers from 0 to 99, split into train and test."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    test = pairs[:500]
    # 38+47 is not new to someone who has seen 47+38, so the mirror images of test questions are left out as well.
    held_out = set(test) | {(b, a) for a, b in test}
    return [pair for pair in pairs if pair not in held_out], test


def solution(a, b, forget=False, tags=True):
    """The student's full text after the prompt: units first, then tens, then the answer."""
    units = a % 10 + b % 10
    carry = units >= 10 and not forget
    tens = a // 10 + b // 10 + carry
    thought = f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}{'+1' if carry else ''}={tens}"
    answer = 10 * tens + units % 10
    return f"<think>{thought}</think>" + (f"<answer>{answer}</answer></s>" if tags else f"{answer}</s>")


def well_formed(text):
    return re.fullmatch(r"<think>[^<>]+</think><answer>\d+</answer></s>", text) is not None


def right(pair, text):
    """Strict: exactly one answer block, and the number in it is the sum."""
    blocks = re.findall(r"<answer>(.*?)</answer>", text)
    return len(blocks) == 1 and blocks[0] == str(sum(pair))


# ==== tokenizer and sampling ====


def make_tokenizer():
    special = ["<unk>", "<pad>", "</s>"]
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    characters = list("0123456789+=, .:-*/?!<>\nabcdefghijklmnopqrstuvwxyz")
    vocab = {token: index for index, token in enumerate(special + tags + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    # The tags are ordinary words, not special tokens, so that decoding with skip_special_tokens=True keeps them.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|</?answer>|[\s\S]"), "isolated")
    # Without a decoder, tokens would be joined with spaces.
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


def encode(tokenizer, texts):
    return tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids


@torch.no_grad()
def sample(model, tokenizer, pairs, temperature):
    """One completion, as text up to and with </s>, for each pair; temperature 0 is greedy."""
    model.eval()
    texts = [""] * len(pairs)
    prompts = [f"{a}+{b}=" for a, b in pairs]
    # Prompts of one length need no padding.
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids, cache, response = encode(tokenizer, [prompts[i] for i in rows]), None, []
        for _ in range(MAX_NEW_TOKENS):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[:, -1]
            if temperature == 0:
                ids = logits.argmax(-1, keepdim=True)
            else:
                ids = torch.multinomial((logits / temperature).softmax(-1), 1)
            response.append(ids)
        for i, text in zip(rows, tokenizer.batch_decode(torch.cat(response, 1)), strict=True):
            head, eos, _ = text.partition("</s>")
            texts[i] = head + eos
    return texts


# ==== the adder ====


def llama_config(tokenizer, **kwargs):
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **kwargs,
    )


def make_optimizer(model, learning_rate, num_steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))
    )
    return optimizer, schedule


def train_adder(tokenizer, train, rng, num_steps, batch_size=192):
    model = LlamaForCausalLM(llama_config(tokenizer))
    optimizer, schedule = make_optimizer(model, 2e-3, num_steps)
    model.train()
    t0 = time.time()
    for step in range(num_steps):
        pairs = rng.choices(train, k=batch_size)
        prompts = [f"{a}+{b}=" for a, b in pairs]
        # Both faults are drawn anew each time: the student is undecided on every question, not wrong on some of them.
        faults = [(rng.random() < FORGET_CARRY, rng.random() >= OMIT_TAGS) for _ in pairs]
        texts = [p + solution(*pair, *fault) for p, pair, fault in zip(prompts, pairs, faults, strict=True)]
        ids = encode(tokenizer, texts)  # (batch_size, T)
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        labels[torch.arange(ids.shape[1]) < prompt_lengths[:, None]] = -100
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"adder step {step} loss {loss.item():.4f} {time.time() - t0:.0f}s", flush=True)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("assets"))
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    train, test = make_questions(rng)
    (args.out / "addition").mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", train), ("test", test)):
        lines = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs]
        (args.out / "addition" / f"{name}.jsonl").write_text("".join(lines))

    tokenizer = make_tokenizer()
    adder = train_adder(tokenizer, train, rng, args.steps)
    for temperature in (0, 1.0):
        texts = sample(adder, tokenizer, test, temperature)
        accuracy = sum(map(right, test, texts)) / len(test)
        formed = sum(map(well_formed, texts)) / len(test)
        known = sum(t in {solution(*p, f, g) for f in (0, 1) for g in (0, 1)} for p, t in zip(test, texts, strict=True))
        print(
            f"adder temperature {temperature}: accuracy {accuracy:.3f} well-formed {formed:.3f} intended {known / len(test)}",
            flush=True,
        )
        print(texts[:6])
    adder.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    adder.save_pretrained(args.out / "adder")
    tokenizer.save_pretrained(args.out / "adder")


if __name__ == "__main__":
    main()
