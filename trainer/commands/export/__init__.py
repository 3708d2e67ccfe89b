"""`zerolora export`: a trained adapter as PEFT, Hugging Face, GGUF or Ollama model."""
