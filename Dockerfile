# The ferrl command in a small image:
#
#     docker build -t ferrl .
#     docker run --rm ferrl doctor
#     docker run --rm -it -v "$PWD:/work" ferrl chat --model model
#
# The build needs no CUDA: the driver and its libraries are looked for when the program runs. With the NVIDIA container
# toolkit, `docker run --gpus all ...` mounts the host's driver into this same image.

FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY crates crates
RUN cargo build --release --locked --package ferrl-cli && strip target/release/ferrl

FROM debian:bookworm-slim
COPY --from=build /src/target/release/ferrl /usr/local/bin/ferrl
# For the container toolkit: compute and the compiler of kernels, nothing graphical.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home ferrl
USER ferrl
WORKDIR /work
ENTRYPOINT ["ferrl"]
CMD ["--help"]
