"""Fields and values of torchtitan's train_configs/llama3_8b.py (2025)."""

from torchtitan.config import (
    ActivationCheckpoint,
    Checkpoint,
    Job,
    JobConfig,
    Metrics,
    Model,
    Optimizer,
    Training,
)

default_config = JobConfig(
    job=Job(description="8B"),
    metrics=Metrics(enable_tensorboard=True),
    model=Model(name="llama3", flavor="8B", hf_assets_path="./assets/hf/Llama-3.1-8B"),
    optimizer=Optimizer(lr=3e-4),
    training=Training(local_batch_size=1, seq_len=8192, steps=1000, dataset="c4"),
    checkpoint=Checkpoint(interval=500),
    activation_checkpoint=ActivationCheckpoint(mode="selective", selective_ac_option="op"),
)
