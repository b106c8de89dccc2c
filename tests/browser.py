"""Debian's Chromium, as the tests that click start it: nothing that it does by itself reaches a network."""

CHROMIUM = "chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
