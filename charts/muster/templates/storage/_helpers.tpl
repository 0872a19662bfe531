{{/* The claim that holds models, weights, checkpoints and run directories; mounted at /muster everywhere. */}}
{{- define "muster.storage.claim" -}}
{{- default .Values.storage.name .Values.storage.existingClaim -}}
{{- end -}}
