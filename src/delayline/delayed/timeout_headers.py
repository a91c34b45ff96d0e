"""What the timeout manager writes on messages (reference 2.1)."""

from __future__ import annotations

from typing import Final


class TimeoutHeaders:
    """Header names of the timeout manager, as NServiceBus writes them."""

    EXPIRE: Final = "NServiceBus.Timeout.Expire"
    DESTINATION: Final = "NServiceBus.Timeout.RouteExpiredTimeoutTo"
    CLEAR: Final = "NServiceBus.ClearTimeouts"
    SAGA_ID: Final = "NServiceBus.SagaId"
    TIMEOUT_ID: Final = "Timeout.Id"
    RELATED_TIMEOUT: Final = "NServiceBus.RelatedToTimeoutId"
    CONTROL_MESSAGE: Final = "NServiceBus.ControlMessage"
    #: Before version 5: the id on a request to dispatch.
    OLD_TIMEOUT_ID: Final = "NServiceBus.Timeout.TimeoutIdToDispatch"
    #: Version 5: where replies go, while the message waits.
    OLD_REPLY_TO: Final = "NServiceBus.Timeout.ReplyToAddress"


TRUE: Final = "True"
