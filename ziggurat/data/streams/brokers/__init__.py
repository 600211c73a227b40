"""Message brokers that a stream may read from: one file each."""

from __future__ import annotations

from ziggurat.data.streams.brokers.broker import (
    Broker,
    BrokerAway,
    Messages,
    Reader,
    Subscription,
    Waiting,
    broker_of,
    is_broker,
)
from ziggurat.data.streams.brokers.redis_streams import RedisStreams

REDIS = Broker.add(RedisStreams())

__all__ = [
    "REDIS",
    "Broker",
    "BrokerAway",
    "Messages",
    "Reader",
    "RedisStreams",
    "Subscription",
    "Waiting",
    "broker_of",
    "is_broker",
]
