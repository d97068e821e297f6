#!/bin/sh
# Makes what compose.yaml mounts: secrets/, state/ and .env, readable by their owner alone.
# What is there already stays, so that a second call changes no password.
set -eu
umask 077
cd "$(dirname "$0")"
mkdir -p secrets state/runs state/targets state/redis state/prometheus state/grafana
chmod 700 secrets state

random() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
hash() { printf '%s' "$1" | sha256sum | cut -d ' ' -f 1; }

[ -e secrets/ray_token ] || random > secrets/ray_token
[ -e secrets/grafana_password ] || random > secrets/grafana_password
# Two users, each with its own keys (Ray deletes one named DUMMY, to learn who leads a Redis cluster). Redis is given hashes; passwords are in the addresses.
if [ ! -e secrets/redis_users.acl ]; then
    coordinator=$(random) ray=$(random)
    printf 'redis://m3pc:%s@redis:6390/0' "$coordinator" > secrets/coordinator_url
    printf 'redis://ray:%s@redis:6390' "$ray" > secrets/gcs_url
    printf '%s' "$ray" > secrets/gcs_password
    cat > secrets/redis_users.acl <<ACL
user default off
user m3pc on #$(hash "$coordinator") resetkeys ~m3pc:* resetchannels -@all +evalsha +script|load +time +set +getrange +pttl +del +hget +hset +hlen +hexists +hgetall +auth +ping
user ray on #$(hash "$ray") resetkeys ~RAY* ~DUMMY resetchannels -@all +@hash +@string +@keyspace +@connection -@dangerous +info +cluster|info
ACL
fi
# Everything runs as the caller, who then owns what it writes; for root, as the images' own user.
user=$(id -u) group=$(id -g)
if [ "$user" = 0 ]; then
    user=1000 group=1000
    chown -R "$user:$group" secrets state
fi
[ -e .env ] || printf 'M3PC_UID=%s\nM3PC_GID=%s\n' "$user" "$group" > .env
