"""Multi-turn chat: each turn repeats all that was said before."""

from perf._users import HttpUser, ZmqUser

SCENARIO = (
    "multi_turn:clients=100,rounds=4,request_length=96,output_length=16,rate=0.5,think_ms=500"
)


class Chat(HttpUser):
    """Conversations over HTTP."""

    scenario = SCENARIO


class ChatZmq(ZmqUser):
    """Conversations over ZMQ."""

    scenario = SCENARIO
