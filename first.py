"""GRPO in a hundred lines. Run it with python first.py: it takes half a minute on two cores.

A small model that adds two numbers learns to carry from rewards alone. For each of B questions q,
the policy samples a group of G responses o_1 .. o_G, with rewards r_1 .. r_G. In all there are N =
B*G responses. P, R and V count the tokens of a prompt, a response and the vocabulary. GRPO
(DeepSeekMath, arXiv:2402.03300v3, Eq. 3 without its KL term) maximizes

    J      = E[ 1/G sum_i 1/|o_i| sum_t min(rho_it A_i, clip(rho_it, 1-eps, 1+eps) A_i) ]
    rho_it = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)    pi_old: the policy that sampled
    A_i    = (r_i - mean(r_1 .. r_G)) / (std(r_1 .. r_G) + 1e-4)    1e-4: no 0/0 at equal rewards

What grpo.py adds: a faster sampler, micro-batches and bf16, because larger models need time and
memory. A KL to the initial model, a learning-rate schedule and gradient clipping, because long runs
drift. Chat templates, all EOS tokens and numbers in free text, because models and data differ.
Checkpoints, logs, evaluations and checks, because runs are cut off and mistakes are silent.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(__file__).resolve().parent / "assets"  # found from any working directory
MODEL = ASSETS / "addition" / "adder"
SEED = 1
B = 16
G = 8
MAX_NEW_TOKENS = 32
TEMPERATURE = 1.0
NUM_STEPS = 40
NUM_UPDATES = 2  # in each step, on the same rollout
LEARNING_RATE = 5e-5
CLIP_EPS = 0.2


def rollout(model, tokenizer, rows, **options):
    """Sample a response to each of N questions, and reward it."""
    prompts = tokenizer([row["question"] for row in rows], padding=True, return_tensors="pt")
    ids = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, **options)  # (N, P + R)
    response_ids = ids[:, prompts.input_ids.shape[1] :]  # (N, R)

    # The first EOS token counts, and nothing after it does.
    is_eos = (response_ids == tokenizer.eos_token_id).long()  # (N, R)
    num_eos_before = is_eos.cumsum(1) - is_eos  # (N, R)
    response_mask = (num_eos_before == 0).long()  # (N, R)
    attention_mask = torch.cat([prompts.attention_mask, response_mask], 1)  # (N, P + R)

    # The reward is 1 for a response that ends in the right answer, and 0 for any other.
    texts = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    ends = [f"<answer>{row['answer']}</answer>" for row in rows]
    is_right = [text.endswith(end) for text, end in zip(texts, ends, strict=True)]
    rewards = torch.tensor(is_right).float()  # (N,)
    return rewards, texts, ids, attention_mask, response_mask


def compute_advantages(rewards):
    assert rewards.shape[1] > 1  # a group of one has no std
    rewards = rewards - rewards[:, :1]  # so that equal rewards give exactly 0, without rounding
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def compute_logprobs(model, ids, attention_mask, response_mask):
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # (N, P + R), padding isn't counted
    outputs = model(ids, attention_mask=attention_mask, position_ids=positions)
    # The logits at a token predict the next token. Divide by the temperature, as generate does.
    R = response_mask.shape[1]
    logprobs = (outputs.logits[:, -R - 1 : -1] / TEMPERATURE).log_softmax(2)  # (N, R, V)
    return logprobs.gather(2, ids[:, -R:, None])[:, :, 0]  # (N, R), those of the sampled tokens


def policy_loss(logprobs, old_logprobs, advantages, response_mask):
    ratio = (logprobs - old_logprobs).exp()  # (N, R)
    clipped_ratio = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)  # (N, R)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)  # (N, R)
    # (N,): the mean over the tokens of each response.
    objective = (surrogate * response_mask).sum(1) / response_mask.sum(1)
    return -objective.mean()


def main():
    torch.manual_seed(SEED)
    train = [json.loads(line) for line in open(ASSETS / "addition" / "train.jsonl")]
    test = [json.loads(line) for line in open(ASSETS / "addition" / "test.jsonl")]
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    rewards, *_ = rollout(model, tokenizer, test, do_sample=False)
    print(f"before: accuracy {rewards.mean():.3f} on {len(test)} held-out questions, greedy")

    # compute_logprobs uses the whole softmax, so sample from all of it: top_k is 50 by default.
    sampling = dict(do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0)
    for step in range(1, NUM_STEPS + 1):
        questions = [train[i] for i in torch.randint(len(train), (B,))]  # B
        rows = [question for question in questions for _ in range(G)]  # N, in groups of G
        sampled = rollout(model, tokenizer, rows, **sampling)
        rewards, texts, ids, attention_mask, response_mask = sampled
        advantages = compute_advantages(rewards.view(B, G)).view(-1, 1)  # (N, 1)
        with torch.no_grad():
            old_logprobs = compute_logprobs(model, ids, attention_mask, response_mask)  # (N, R)
        # In the first update every ratio is 1. From the second update on the clip can act.
        for _ in range(NUM_UPDATES):
            logprobs = compute_logprobs(model, ids, attention_mask, response_mask)  # (N, R)
            loss = policy_loss(logprobs, old_logprobs, advantages, response_mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # In the last update: where the clip acts, and how far the ratios are from 1.
        logratio = logprobs - old_logprobs  # (N, R)
        clipped_low = (logratio.exp() < 1 - CLIP_EPS) & (advantages < 0)  # (N, R)
        clipped_high = (logratio.exp() > 1 + CLIP_EPS) & (advantages > 0)  # (N, R)
        clip_frac = (clipped_low | clipped_high)[response_mask == 1].float().mean()
        approx_kl = (0.5 * logratio[response_mask == 1] ** 2).mean()
        print(f"step {step}: mean reward {rewards.mean():.2f}, {clip_frac=:.4f}, {approx_kl=:.5f}")
        print(f"    {rows[0]['question']}{texts[0]}")

    rewards, *_ = rollout(model, tokenizer, test, do_sample=False)
    print(f"after: accuracy {rewards.mean():.3f}")


if __name__ == "__main__":
    main()
