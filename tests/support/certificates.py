"""Certificates of an authority of our own, made by the `openssl` command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    """Signs certificates; everything lies in one directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self.ca = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        files = ("-keyout", str(self._key), "-out", str(self.ca))
        _openssl("req", "-x509", *_NEW_KEY, *files, "-days", "2", "-subj", f"/CN={name}")

    def issue(self, name: str, *alternatives: str) -> Certificate:
        """`alternatives`: "DNS:localhost", "IP:127.0.0.1"; without any the subject is the only name."""
        issued = Certificate(certificate=self._directory / f"{name}.pem", key=self._directory / f"{name}.key")
        request, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        _openssl("req", *_NEW_KEY, "-keyout", str(issued.key), "-out", str(request), "-subj", f"/CN={name}")
        extensions.write_text(f"subjectAltName={','.join(alternatives or (f'DNS:{name}',))}\n")
        signed_by = ("-CA", str(self.ca), "-CAkey", str(self._key), "-CAcreateserial", "-extfile", str(extensions))
        _openssl("x509", "-req", "-in", str(request), *signed_by, "-out", str(issued.certificate), "-days", "2")
        return issued

    def replace(self, old: Certificate, new: Certificate) -> None:
        """Puts the new files in the place of the old ones, the key first: for a moment the two do not fit."""
        shutil.move(new.key, old.key)
        shutil.move(new.certificate, old.certificate)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
