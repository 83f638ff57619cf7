{{- /* Of a workload: (dict "root" . "component" "seed" "name" "actor-a"). */ -}}
{{- define "tensorhub.selector" -}}
app.kubernetes.io/name: tensorhub
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .name }}
tensorhub/seed: {{ . }}
{{- end }}
{{- end }}

{{- define "tensorhub.labels" -}}
app.kubernetes.io/name: tensorhub
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tensorhub.replicas" -}}
{{ eq .Values.coordinator.ha "none" | ternary 1 2 }}
{{- end }}

{{- /* Each coordinator has a Service of its own: a virtual address that outlives its pod, and that no cache of DNS delays. */ -}}
{{- define "tensorhub.address" -}}
{{- range $n := until (include "tensorhub.replicas" . | int) -}}
{{ if $n }},{{ end }}tcp://{{ $.Release.Name }}-{{ $n }}.{{ $.Release.Namespace }}.svc:17337
{{- end }}
{{- end }}

{{- define "tensorhub.tokenSecret" -}}
{{ .Values.token.existingSecret | default (printf "%s-token" .Release.Name) }}
{{- end }}

{{- /* Of each pod: who runs it. `fsGroup` lets that user read the token (0440). */ -}}
{{- define "tensorhub.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tensorhub.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
ports:
  - {name: http, containerPort: 8080}
{{- end }}

{{- define "tensorhub.probe" -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ empty .root.Values.tls.existingSecret | ternary "HTTP" "HTTPS" }}}
timeoutSeconds: 5
{{- end }}

{{- define "tensorhub.environment" -}}
- {name: TENSORHUB_TOKEN_FILE, value: /var/run/tensorhub/token/token}
{{- if .Values.tls.existingSecret }}
- {name: TENSORHUB_TLS_CERT, value: /var/run/tensorhub/tls/tls.crt}
- {name: TENSORHUB_TLS_KEY, value: /var/run/tensorhub/tls/tls.key}
- {name: TENSORHUB_TLS_CA, value: /var/run/tensorhub/tls/ca.crt}
{{- end }}
{{- end }}

{{- define "tensorhub.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: token, mountPath: /var/run/tensorhub/token, readOnly: true}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /var/run/tensorhub/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "tensorhub.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 64Mi}}
- name: token
  secret:
    secretName: {{ include "tensorhub.tokenSecret" . }}
    defaultMode: 0440
    items: [{key: token, path: token}]
{{- with .Values.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- /* A worker that keeps versions in memory: (dict "root" . "zone" ""  "memory" "16Gi" "cpu" "2"). */ -}}
{{- define "tensorhub.holder" -}}
env:
  {{- include "tensorhub.environment" .root | nindent 2 }}
  - {name: TENSORHUB_ADDRESS, value: "{{ include "tensorhub.address" .root }}"}
  - name: TENSORHUB_SITE
    {{- if .zone }}
    value: {{ .zone | quote }}
    {{- else }} # Kubernetes 1.35 copies this label from the node to the pod
    valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
    {{- end }}
  - name: TENSORHUB_RACK # pods of one node are near each other, and share no memory
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  - name: MEMORY_MI
    valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}
resources:
  requests: {cpu: {{ .cpu | quote }}, memory: {{ .memory }}}
  limits: {memory: {{ .memory }}}
livenessProbe:
  {{- include "tensorhub.probe" (dict "root" .root "path" "/healthz") | nindent 2 }}
  periodSeconds: 20
readinessProbe:
  {{- include "tensorhub.probe" (dict "root" .root "path" "/readyz") | nindent 2 }}
volumeMounts:
  {{- include "tensorhub.mounts" .root | nindent 2 }}
{{- end }}
