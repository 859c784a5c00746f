"""Several questions about one text with transformers: the text is computed once, for all of them.

The text goes through the model into a `PagedCache`. A deep copy of that cache shares its blocks, so
each question starts from there; only the block in which the text ends is copied. The same tokens
come out as from `generate()` with transformers' own cache, which computes the text every time.
"""

import copy

import torch

from paged_ops.demo.llama import load_llama, load_tokenizer
from paged_ops.integrations.transformers import PagedCache, register

TEXT = (
    "ACT I. SCENE I. A public place.\n\nEnter the KING, with his Lords and Attendants; then a "
    "Messenger, in haste.\n\nKING.\nSpeak, what news from the field? Who has the day?\n\n"
)
QUESTIONS = [TEXT + speaker for speaker in ("MESSENGER.\n", "FIRST LORD.\n", "QUEEN.\n", "ALL.\n")]

model, tokenizer = load_llama(), load_tokenizer()
computed = 0


def count(layer, inputs, output):
    global computed
    computed += inputs[0].numel()


def answer(question, **options):
    inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
    outputs = model.generate(**inputs, max_new_tokens=24, do_sample=False, **options)
    return outputs[0].tolist()


model.get_input_embeddings().register_forward_hook(count)
expected = [answer(question) for question in QUESTIONS]
apart, computed = computed, 0

register()  # once in a process
model.set_attn_implementation("paged_ops")
cache = PagedCache(model, num_blocks=64, block_size=16)
computed = 0  # without the trial of the model, which happens once
with torch.no_grad():
    model(tokenizer(TEXT, return_tensors="pt")["input_ids"], cache=cache)
caches = [copy.deepcopy(cache) for _ in QUESTIONS]
answers = [answer(q, cache=shared) for q, shared in zip(QUESTIONS, caches, strict=True)]
assert answers == expected

for text in answers[:2]:
    print(tokenizer.decode(text)[len(TEXT) :], end="\n\n")
stats = cache.groups["full"].stats()
print(f"tokens computed: {computed}, without sharing {apart}")
print(f"blocks in use: {stats.num_used}, for {stats.request_tokens} tokens of all the requests")
assert computed < apart / 2
