"""Replace parts of transformers, PEFT, torch and DeepSpeed: forwards, attention, the loss, recomputation."""
