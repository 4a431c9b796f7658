"""D02: a socket that is quiet for a while must not lose its channel layer."""

from channels.layers import channel_layers
from channels_redis.core import RedisChannelLayer
from django.conf import settings


def test_a_quiet_socket_outlives_the_layers_wait_for_messages() -> None:
    layer = channel_layers["default"]
    if not settings.REDIS_URL:
        # The embedded layer waits in memory: there is no connection that could time out.
        assert not isinstance(layer, RedisChannelLayer)
        return
    assert isinstance(layer, RedisChannelLayer)
    for host in layer.hosts:
        assert host["socket_timeout"] > 2 * layer.brpop_timeout
