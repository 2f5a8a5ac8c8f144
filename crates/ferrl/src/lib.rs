//! Post-training and reinforcement learning for language models.
