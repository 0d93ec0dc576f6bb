"""Fine-tuning methods: full fine-tuning, LoRA, and the parts of OSFT."""
