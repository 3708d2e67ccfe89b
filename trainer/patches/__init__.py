"""Replace parts of transformers, PEFT, torch and DeepSpeed: `forward` methods, attention, the loss, recomputation."""
