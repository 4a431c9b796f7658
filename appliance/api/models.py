from django.conf import settings
from django.db import models


class StoredResponse(models.Model):
    """One answer of `/v1/responses` that its owner may read again and go on from."""

    id = models.CharField(max_length=64, primary_key=True)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="stored_responses"
    )
    # Not a foreign key: what goes on from a deleted one can still be read.
    previous_id = models.CharField(max_length=64, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    # Bytes of `items` and `answer` as JSON.
    size = models.PositiveIntegerField()
    # The items of the request's own input, each with an id.
    items = models.JSONField()
    # The response object as it was sent.
    answer = models.JSONField()

    class Meta:
        indexes = [models.Index(fields=["owner", "created_at"])]

    def __str__(self) -> str:
        return self.id
