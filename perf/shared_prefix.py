"""Groups of prompts that share a system prompt."""

from perf._users import HttpUser, ZmqUser

SCENARIO = (
    "shared_prefix:groups=8,prompts_per_group=50,system_length=256,question_length=24,"
    "output_length=16,rate=0.5"
)


class SharedPrefix(HttpUser):
    """Shared system prompts over HTTP."""

    scenario = SCENARIO


class SharedPrefixZmq(ZmqUser):
    """Shared system prompts over ZMQ."""

    scenario = SCENARIO
