# The command lockkeeper, to run a program under a lock, or to be copied into the image of your program:
#
#   COPY --from=lockkeeper /usr/bin/lockkeeper /usr/bin/
#
# In the folder of an unpacked release:
#
#   docker build -f share/lockkeeper/docker/command.Dockerfile -t lockkeeper .
ARG BASE=debian:13-slim
FROM ${BASE}
# For rediss://: the authorities that are trusted.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --chmod=0755 bin/lockkeeper /usr/bin/
# Numbers, so that runAsNonRoot of Kubernetes can see it.
USER 65534:65534
ENTRYPOINT ["lockkeeper"]
