"""Convert text to tokens and back: tokenizer, chat template, prompts."""
