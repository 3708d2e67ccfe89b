"""`zerolora export`: export a trained adapter in PEFT's format, or as a Hugging Face, GGUF or Ollama model."""
