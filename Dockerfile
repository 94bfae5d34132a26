# trainfit with PyTorch and CUDA, for a machine with NVIDIA GPUs and their container toolkit.
# Untested: this file has not been built yet, as it was written where no container can be.
#
#   docker build -t trainfit .
#   docker run --rm --gpus all trainfit predict llama-3.1-8b --gpu h100-sxm
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/work/runs" trainfit measure llama-3.1-8b-h200
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

# Triton compiles the launchers of its kernels.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

# The image's own interpreter has torch: the package goes beside it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /opt/trainfit
RUN python -m pip install --no-cache-dir -c /opt/trainfit/requirements/constraints.txt \
    '/opt/trainfit[peft,plots,tensorboard,datasets,web]'

WORKDIR /work
ENTRYPOINT ["trainfit"]
