#!/usr/bin/env python3
"""TRL worker: whole GRPO steps (generate, reward, advantages, loss, AdamW) of a small random Qwen2.

Protocol in common.py; the tokens counted are the new ones (prompts x samples x new). Settings: no reference model
(beta 0), one pass over each rollout, the whole step in one micro-batch, every answer of full length. --dtype f32: all in
float32; amp: float32 weights, training under bfloat16 autocast.

The trainer owns its loop, so requests are read where it is about to begin a step: a callback waits there for the next
line, and answers it after the last step that was asked for.
"""
import argparse
import os
import tempfile
import time

import common


class Random:
    """The generator of `ferrl bench grpo`, so that both are asked the same."""

    def __init__(self, state):
        self.state = state

    def below(self, n):
        self.state = (self.state * 1664525 + 1013904223) % (1 << 32)
        return (self.state >> 8) % n

    def word(self):
        return "".join(chr(ord("a") + self.below(26)) for _ in range(2 + self.below(8)))


def texts(options):
    """Lines to train the tokenizer on, and prompts."""
    random = Random(1)
    words = [random.word() for _ in range(3000)]

    def text(count):
        return " ".join(words[random.below(len(words))] for _ in range(count))
    return [text(30) for _ in range(500)], [text(options.words) for _ in range(256)]


def tokenizer(options, lines):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=options.vocab, special_tokens=["<pad>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def main():
    parser = argparse.ArgumentParser(description="GRPO worker")
    common.model_options(parser)
    parser.add_argument("--dtype", choices=["f32", "amp"], default="f32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--words", type=int, default=12)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    answers = common.claim_stdout()
    common.limit_threads(options.threads)
    os.environ.update(HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    torch, transformers, datasets, trl = common.need("torch", "transformers", "datasets", "trl")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    lines, prompts = texts(options)
    words = tokenizer(options, lines)
    options.vocab = len(words)
    model = common.small_qwen2(transformers, options, 16 * options.words + options.new)
    model.config.eos_token_id, model.config.pad_token_id = words.eos_token_id, words.pad_token_id
    answers_per_step = options.prompts * options.samples
    lengths = []

    def reward(completions, completion_ids, **_):
        lengths.append([len(ids) for ids in completion_ids])
        return [float("ab" in text) for text in completions]

    class Served(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.requests, self.left, self.seconds = common.requests(answers), 0, []

        def on_step_begin(self, args, state, control, **_):
            if self.left == 0:
                self.left = next(self.requests, 0)
                if self.left == 0:
                    os._exit(0)  # the end of the input; nothing is worth tidying up
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.perf_counter() - self.start)
            self.left -= 1
            if self.left == 0:
                short = [n for step in lengths for n in step if n != options.new]
                steps, counted = len(self.seconds), sum(map(len, lengths))
                if short or counted != steps * answers_per_step:
                    answer = {"error": f"{steps} steps made {counted} answers, of lengths other than asked: {short}"}
                else:
                    answer = common.rates(self.seconds, answers_per_step * options.new)
                common.reply(answers, answer)
                self.seconds = []
                lengths.clear()

    with tempfile.TemporaryDirectory() as out:
        settings = trl.GRPOConfig(
            output_dir=out, use_cpu=True, bf16=options.dtype == "amp", per_device_train_batch_size=answers_per_step,
            gradient_accumulation_steps=1, num_generations=options.samples, max_completion_length=options.new,
            max_steps=1 << 20, learning_rate=1e-4, lr_scheduler_type="constant", weight_decay=0.01, beta=0.0,
            temperature=1.0, num_iterations=1, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            seed=0, gradient_checkpointing=False, generation_kwargs={"min_new_tokens": options.new},
            dataloader_num_workers=0)
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=reward, args=settings, processing_class=words, callbacks=[Served()],
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]))
        trainer.train()


if __name__ == "__main__":
    main()
