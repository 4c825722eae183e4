"""Live executions against the code of this process."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django import conf
from loom_django.management.options import add_format
from loom_django.runtime import loom
from loom_django.services.deploy_check import Finding, Group, deploy_check

# Of the JSON form; a reader may count on the fields of its number, and on more coming to them.
FORMAT = 1


class Command(BaseCommand):
    help = (
        "Tells which live executions the code of this process would leave alone, and what else to know before it "
        "is deployed. Reads the database and changes nothing. Exit code 1 if any would be left alone."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        groups, findings = deploy_check(loom.engine, conf.get_settings().DATABASE)
        breaking = [finding for finding in findings if finding.breaking]
        if options["format"] == "json":
            report = {
                "format": FORMAT,
                "ok": not breaking,
                "live": [_group(group) for group in groups],
                "findings": [_finding(finding) for finding in findings],
            }
            self.stdout.write(json.dumps(report))
        else:
            self._print(groups, findings)
        if breaking:
            stranded = sum(finding.live for finding in breaking)
            raise CommandError(f"{stranded} live executions would be left alone", returncode=1)

    def _print(self, groups: list[Group], findings: list[Finding]) -> None:
        for group in groups:
            recorded = group.recorded
            goes_on = f"version {group.continues}" if group.continues else "nothing here"
            body = f" fingerprint {recorded.code_hash[:19]}" if recorded.code_hash else ""
            self.stdout.write(
                f"{recorded.flow_id} version {recorded.version} {recorded.flow_hash[:19]}{body}: {group.live} live since "
                f"{group.oldest:%Y-%m-%d}, continued by {goes_on}"
            )
        for finding in findings:
            kind = "BREAKING" if finding.breaking else "advisory"
            self.stdout.write(f"{kind} {finding.id}: {finding.message} {finding.way_out}")
        count = sum(group.live for group in groups)
        self.stdout.write(f"{count} live executions, {len(findings)} findings")


def _group(group: Group) -> dict[str, Any]:
    recorded = group.recorded
    return {
        "flow_id": recorded.flow_id,
        "version": recorded.version,
        "flow_hash": recorded.flow_hash,
        "code_hash": recorded.code_hash,
        "live": group.live,
        "oldest": group.oldest.isoformat(),
        "example": group.example,
        "continued_by": group.continues,
        "mismatch": group.mismatch or None,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "breaking": finding.breaking,
        "flow_id": finding.flow_id,
        "version": finding.version,
        "live": finding.live,
        "example": finding.example or None,
        "mismatch": finding.mismatch or None,
        "recorded": finding.recorded or None,
        "registered": finding.registered or None,
        "differences": list(finding.differences),
        "message": finding.message,
        "way_out": finding.way_out,
    }
