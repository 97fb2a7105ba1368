# A Redis or Valkey server with Lockkeeper, as the official image is otherwise: same settings, same
# volume, same user. In the folder of an unpacked release:
#
#   docker build -f share/lockkeeper/docker/server.Dockerfile -t redis-lockkeeper .
#   docker build -f share/lockkeeper/docker/server.Dockerfile --build-arg BASE=valkey/valkey:8 -t valkey-lockkeeper .
#
# Not an image of Alpine: the module is linked with glibc.
ARG BASE=redis:8
FROM ${BASE}
# Not below /usr/local/lib/redis/modules: from redis:8 on all that is there is loaded by that image itself.
COPY --chmod=0755 lib/liblockkeeper.so /usr/lib/redis/modules/
COPY --chmod=0755 share/lockkeeper/docker/server-entrypoint /usr/local/bin/
ENTRYPOINT ["server-entrypoint"]
