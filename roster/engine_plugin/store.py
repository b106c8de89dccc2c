"""The object store as the plugins' settings describe it."""

from roster.engine_plugin.settings import PluginSettings
from storage.s3 import S3Store


def open_store(bucket: str, region: str, settings: PluginSettings, *, hurried: bool = False) -> S3Store:
    """The bucket that the settings name; nothing is asked of it yet. `hurried`: see `S3Store.open`."""
    access_key, secret_key = settings.store_access_key, settings.store_secret_key
    return S3Store.open(
        endpoint=settings.store_endpoint,
        bucket=bucket,
        region=region,
        access_key=None if access_key is None else access_key.get_secret_value(),
        secret_key=None if secret_key is None else secret_key.get_secret_value(),
        addressing_style=settings.store_addressing_style,
        hurried=hurried,
    )
