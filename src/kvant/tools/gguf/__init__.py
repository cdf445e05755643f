"""GGUF files, the format of llama.cpp, Ollama and LM Studio, turned into model folders."""
