{{/* The compiled pipeline, with the images and names of this installation in place of those it was compiled with. */}}

{{- define "muster.pipeline.name" -}}
{{ include "muster.fullname" . }}-pipeline
{{- end -}}

{{- define "muster.pipeline.account" -}}
{{- default (first .Values.rbac.pipelineAccounts) .Values.pipeline.serviceAccount -}}
{{- end -}}

{{- define "muster.pipeline.compiled" -}}
{{- $text := .Files.Get "files/grpo.yaml" -}}
{{- range $was, $is := dict
      "image: muster-base:0.1.0-python3.11" (printf "image: %s" (include "muster.image" (list . "base")))
      "constant: muster-admin" (printf "constant: %s" (include "muster.fleet.secret" .))
      "secretName: muster-admin" (printf "secretName: %s" (include "muster.fleet.secret" .))
      "defaultValue: muster-runs" (printf "defaultValue: %s" (include "muster.storage.claim" .)) -}}
{{- if not (contains $was $text) -}}
{{- fail (printf "files/grpo.yaml does not hold %q; compile it without MUSTER_BASE_IMAGE: make chart" $was) -}}
{{- end -}}
{{- $text = replace $was $is $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}
